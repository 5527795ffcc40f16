"""Protocols that one tool made its own: the chunks of llama.cpp and Megatron-LM's overlapping evaluation.

Notation as in ``protocols``, which is where configs find these two.
"""

import numpy as np

from ppl_eval.protocols.base import (
    IntArray,
    Located,
    Protocol,
    ScoredSums,
    all_equal,
    ceil_div,
    check_between,
    check_bos,
    check_max_seq_len,
    exp_or_infinity,
    tail_note,
)


def llama_cpp(max_seq_len: int = 512, join: str = "", bos: str = "tokenizer") -> Protocol:
    """The second half of each chunk, as ``llama-perplexity`` of llama.cpp scores a text file.

    The stream is cut into W = floor(n/c) chunks of c = ``max_seq_len`` tokens; the model sees each chunk with
    its first token replaced by BOS. Scored: positions floor(c/2)+1..c-1 of each chunk. Denominator: scored
    tokens. ``perplexity_stderr_llama_cpp`` = PPL sqrt((mean of l^2 - (mean of l)^2) / (tokens - 1)) is the
    +/- it prints, which takes tokens as independent.

    BOS: at the head of the stream and in place of each chunk's first token, if the tokenizer adds BOS
    (``tokenizer``), ``always``, or ``never``.

    Reference: ``perplexity`` in ``tools/perplexity/perplexity.cpp`` of ggml-org/llama.cpp, which wants at
    least 2c tokens; here one chunk is enough.

    Args:
        max_seq_len: c, the tool's ``-c``.
        join: text between documents; the tool reads one file as it is.
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len, smallest=3)
    check_bos(bos, ("tokenizer", "always", "never"))
    first_scored = max_seq_len // 2 + 1

    def figures(sums: ScoredSums) -> dict[str, float]:
        mean = sums.nll_sum / sums.num_tokens
        variance = max(sums.nll_sq_sum / sums.num_tokens - mean * mean, 0.0)
        stderr = (variance / max(sums.num_tokens - 1, 1)) ** 0.5
        return {"perplexity_stderr_llama_cpp": exp_or_infinity(mean) * stderr}

    def with_bos(prefix: bool) -> Protocol:
        def locate(length: IntArray, index: IntArray) -> Located:
            chunk = index * max_seq_len
            return chunk + prefix, chunk + first_scored, chunk + max_seq_len, all_equal(index, prefix)

        return Protocol(
            name="llama_cpp",
            max_seq_len=max_seq_len,
            parameters={"max_seq_len": max_seq_len, "join": join, "bos": bos},
            join=join,
            bos=bos,
            num_windows=lambda length: length // max_seq_len,
            locate=locate,
            num_targets=lambda length: length // max_seq_len * (max_seq_len - first_scored),
            prefix_rule="bos" if prefix else None,
            notes=lambda length: tail_note(length, max_seq_len),
            figures=figures,
            covers_text=False,
            for_tokenizer=with_bos if bos == "tokenizer" else None,
        )

    # Until the tokenizer is known it is taken to add BOS: a forgotten `for_tokenizer` then fails for want of
    # a prefix token, rather than score other windows.
    return with_bos(bos != "never")


def megatron(
    max_seq_len: int, overlap_stride: int | None = None, join: str = "", bos: str = "never"
) -> Protocol:
    """Overlapping evaluation, as Megatron-LM scores WikiText-103 zero-shot.

    Window i sees x(iO)..x(iO+L-1), with O = ``overlap_stride``, and its targets are x(iO+1)..x(iO+L). Scored:
    all targets of window 0; of later windows the last O positions (all of them if O = L). Denominator: n - 1,
    which is the number of scored tokens. ``adjusted_perplexity`` = exp(sum l / (W - 1)) with W words of the
    original text between single spaces, as the reference counts them. It caps the mean NLL at 20 before exp;
    this does not.

    BOS: none. With ``each_window``, BOS takes the place of the first token that each window sees.

    Reference: ``_LMDataset`` in ``tasks/zeroshot_gpt/datasets.py`` and ``evaluate.py`` beside it, in
    NVIDIA/Megatron-LM. Its windows without a scored target are left out.

    Args:
        max_seq_len: L, tokens that the model sees at once.
        overlap_stride: O, the reference's ``--overlapping-eval``, from 1 to L; None is L, as there.
        join: text between documents; the reference reads one file as it is. (Words are counted document by
            document, so that one file must be one document to give its ``adjusted_perplexity``.)
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len, smallest=1)
    step = max_seq_len if overlap_stride is None else overlap_stride
    check_between("overlap_stride", step, 1, max_seq_len)
    check_bos(bos)
    prefix = bos == "each_window"

    def num_windows(length: IntArray) -> IntArray:
        return (length > 1) + ceil_div(np.maximum(length - 1 - max_seq_len, 0), step)

    def locate(length: IntArray, index: IntArray) -> Located:
        start = index * step
        score_start = start + 1 + np.where(index == 0, 0, max_seq_len - step)
        return (
            start + prefix,
            score_start,
            np.minimum(start + max_seq_len + 1, length),
            all_equal(index, prefix),
        )

    def figures(sums: ScoredSums) -> dict[str, float]:
        if sums.num_words < 2:
            return {}
        return {"adjusted_perplexity": exp_or_infinity(sums.nll_sum / (sums.num_words - 1))}

    return Protocol(
        name="megatron",
        max_seq_len=max_seq_len,
        parameters={"max_seq_len": max_seq_len, "overlap_stride": step, "join": join, "bos": bos},
        join=join,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=lambda length: np.maximum(length - 1, 0),
        prefix_rule="bos" if prefix else None,
        word_separator="space",
        figures=figures,
    )
