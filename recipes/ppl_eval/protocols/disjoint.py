"""The protocols: documents to windows, each a factory that states its formula.

Notation: a document has tokens x0..x(n-1), L = ``max_seq_len``, and l_i = -ln p(x_i | the context inside its
window). All perplexities are exp(sum of l / denominator). ``bos`` says where BOS goes: ``tokenizer`` (where
the model's own tokenizer call puts it), ``always`` (once, at the head of the stream or document), ``never``,
or ``each_window`` (before every window, never at the head as well); the default is what the reference does. A
new protocol is one more factory, here or anywhere importable: the config names it by its dotted path.
"""

import numpy as np

from ppl_eval.protocols.base import (
    BOS_POLICIES,
    IntArray,
    Located,
    Protocol,
    ScoredSums,
    Windows,
    all_equal,
    ceil_div,
    check_between,
    check_bos,
    check_choice,
    check_max_seq_len,
    exp_or_infinity,
    tail_note,
)


def disjoint(
    max_seq_len: int, join: str = "\n\n", keep_tail: bool = False, bos: str = "tokenizer"
) -> Protocol:
    r"""Windows side by side, as in the tables of the GPTQ and AWQ papers.

    Documents are joined by ``join`` and tokenised in one call; the stream is cut into W = floor(n/L) windows
    of L tokens. Scored: positions 1..L-1 of each. Denominator: scored tokens, W (L-1).

    BOS: the tokenizer's own, once, at the head of the stream. With ``each_window``, BOS goes before the L
    tokens of each window, and position 0 is scored too.

    Reference: ``llama_eval`` in ``llama.py`` of IST-DASLab/gptq; ``awq/entry.py`` of mit-han-lab/llm-awq. It
    averages window means, which is the same number, as all windows are equally long.

    Args:
        max_seq_len: L, tokens of a window.
        join: text between documents.
        keep_tail: score the n mod L tokens that are left too, in a shorter last window. The published tables
            drop them.
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len)
    check_bos(bos)
    prefix = bos == "each_window"

    def num_windows(length: IntArray) -> IntArray:
        # Without a prefix, a tail of one token has nothing to score.
        return length // max_seq_len + (keep_tail & (length % max_seq_len >= 2 - prefix))

    def locate(length: IntArray, index: IntArray) -> Located:
        start = index * max_seq_len
        return start, start + 1 - prefix, np.minimum(start + max_seq_len, length), all_equal(index, prefix)

    def num_targets(length: IntArray) -> IntArray:
        if not keep_tail:
            length = length - length % max_seq_len
        return length - (0 if prefix else ceil_div(length, max_seq_len))

    return Protocol(
        name="disjoint",
        max_seq_len=max_seq_len,
        parameters={"max_seq_len": max_seq_len, "join": join, "keep_tail": keep_tail, "bos": bos},
        join=join,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=num_targets,
        prefix_rule="bos" if prefix else None,
        notes=None if keep_tail else lambda length: tail_note(length, max_seq_len),
    )


def strided(
    max_seq_len: int, stride: int, weighting: str = "exact", join: str = "\n\n", bos: str = "tokenizer"
) -> Protocol:
    r"""Overlapping windows, as the transformers documentation's page on perplexity scores them.

    Windows begin at b = 0, S, 2S, ... and end at e = min(b+L, n); the first that reaches e = n is the last.
    With t = e - (the previous e), the targets i in [e-t, e) with i > b are scored, the rest is context.
    Denominator: scored tokens (``exact``).

    ``weighting: hf_doc`` gives ``perplexity`` as the page's script prints it: exp(sum m_b (t_b - 1) / sum
    (t_b - 1)), where m_b is the mean over the window's scored targets. The script subtracts one from every t
    for the label shift, though only windows without context lose a target to it, so all later windows count
    one token too few. (Where a last window has nothing to score, the script divides by zero; here it is left
    out.)

    BOS: the tokenizer's own, once, at the head of the stream. With ``each_window``, BOS goes before the L
    tokens of each window.

    Reference: "Perplexity of fixed-length models", ``docs/source/en/perplexity.md`` of
    huggingface/transformers.

    Args:
        max_seq_len: L, tokens of a window.
        stride: S, from 1 to L; S = L is disjoint with its tail.
        weighting: ``exact`` or ``hf_doc``.
        join: text between documents.
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len)
    check_between("stride", stride, 1, max_seq_len)
    check_choice("weighting", weighting, ("exact", "hf_doc"))
    # The script knows no BOS of its own.
    check_bos(bos, BOS_POLICIES if weighting == "exact" else ("tokenizer", "always", "never"))
    prefix = bos == "each_window"

    def num_windows(length: IntArray) -> IntArray:
        last = ceil_div(np.maximum(length - max_seq_len, 0), stride)
        return last + 1 - (length - last * stride < 2 - prefix)

    def locate(length: IntArray, index: IntArray) -> Located:
        start = index * stride
        previous_stop = np.where(index == 0, 0, start - stride + max_seq_len)
        stop = np.minimum(start + max_seq_len, length)
        return start, np.maximum(previous_stop, start + 1 - prefix), stop, all_equal(index, prefix)

    def num_targets(length: IntArray) -> IntArray:
        if prefix:
            return length
        return np.maximum(length - 1, 0) if stride < max_seq_len else length - ceil_div(length, max_seq_len)

    def window_weights(windows: Windows) -> IntArray:
        return windows.num_targets - ((windows.start > 0) & (stride < max_seq_len))

    def figures(sums: ScoredSums) -> dict[str, float]:
        ce_loss = sums.weighted_nll_sum / sums.weight_sum
        exact = exp_or_infinity(sums.nll_sum / sums.num_tokens)
        return {
            "ce_loss": ce_loss,
            "perplexity": exp_or_infinity(ce_loss),
            "perplexity_exact_weighting": exact,
        }

    hf_doc = weighting == "hf_doc"
    return Protocol(
        name="strided",
        max_seq_len=max_seq_len,
        parameters={
            "max_seq_len": max_seq_len,
            "stride": stride,
            "weighting": weighting,
            "join": join,
            "bos": bos,
        },
        join=join,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=num_targets,
        denominator="window means weighted by t-1" if hf_doc else "scored tokens",
        prefix_rule="bos" if prefix else None,
        window_weights=window_weights if hf_doc else None,
        figures=figures if hf_doc else None,
    )


def rolling(max_seq_len: int, context_len: int = 1, bos: str = "never") -> Protocol:
    """Every token of every document once, as lm-evaluation-harness scores ``loglikelihood_rolling`` tasks.

    Per document, with the prefix token p: window 0 sees p, x0..x(L-2) and scores x0..x(L-1); each later
    window scores the next w = min(P, remaining) tokens, P = L - ``context_len`` + 1, which end before
    position e, and sees x(e-L-1)..x(e-2). So the short last window has more context. Scored: all n tokens.
    Denominators: tokens, and for ``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte`` the words and
    bytes of the original text.

    BOS: none in the tokens; p is BOS, or EOS where the tokenizer has no BOS. With ``each_window``, p also
    takes the place of the first token that each later window sees. (lm-eval's ``hf`` model leaves BOS in the
    tokens to the tokenizer: one that adds BOS then has it twice, unless lm-eval runs with
    ``add_bos_token=False``. Double BOS is refused here.)

    Reference: ``get_rolling_token_windows`` and ``make_disjoint_window`` in ``lm_eval/utils.py``, which the
    tests hold this closed form against; ``HFLM.loglikelihood_rolling`` calls them with ``context_len`` 1.

    Args:
        max_seq_len: L, most tokens that the model sees at once.
        context_len: fewest context tokens of a later window, from 1 to L.
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range.
    """
    check_max_seq_len(max_seq_len, smallest=1)
    check_between("context_len", context_len, 1, max_seq_len)
    check_bos(bos)
    step = max_seq_len - context_len + 1
    each_window = bos == "each_window"

    def num_windows(length: IntArray) -> IntArray:
        return (length > 0) + ceil_div(np.maximum(length - max_seq_len, 0), step)

    def locate(length: IntArray, index: IntArray) -> Located:
        score_start = np.where(index == 0, 0, max_seq_len + (index - 1) * step)
        stop = np.minimum(max_seq_len + index * step, length)
        start = np.where(index == 0, 0, stop - max_seq_len - 1 + each_window)
        return start, score_start, stop, (index == 0) | each_window

    return Protocol(
        name="rolling",
        max_seq_len=max_seq_len,
        parameters={"max_seq_len": max_seq_len, "context_len": context_len, "bos": bos},
        join=None,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=lambda length: length,
        prefix_rule="bos_or_eos",
    )


def per_sample(max_seq_len: int, too_long: str = "error", bos: str = "tokenizer") -> Protocol:
    """One sample, one window: the token-weighted validation loss of a training run.

    A sample of n tokens is seen as x0..x(n-2). Scored: x1..x(n-1), less those whose label is -100.
    Denominator: scored tokens, over all samples, so that a batch's mean loss weighs what its tokens weigh.

    BOS: what the dataset's transform put there; text gets the tokenizer's own. With ``each_window``, BOS goes
    before every window and x0 is scored.

    Reference: the loss of torchtune's recipes times its number of tokens, summed over the set.

    Args:
        max_seq_len: L, most tokens that the model sees at once.
        too_long: what becomes of a sample that needs more: ``error``; ``truncate`` (its head is scored and
            the rest is not, which the result says); ``window`` (cut into windows side by side, in which every
            target is scored once).
        bos: BOS policy.

    Raises:
        ValueError: for a parameter out of range, and, when windows are counted, for a sample that is too
            long.
    """
    check_max_seq_len(max_seq_len, smallest=1)
    check_choice("too_long", too_long, ("error", "truncate", "window"))
    check_bos(bos)
    prefix = bos == "each_window"

    def all_targets(length: IntArray) -> IntArray:
        return length if prefix else np.maximum(length - 1, 0)

    def num_windows(length: IntArray) -> IntArray:
        targets = all_targets(length)
        if too_long == "error" and len(targets) and targets.max() > max_seq_len:
            sample = int(targets.argmax())
            raise ValueError(
                f"sample {sample} has {int(length[sample])} tokens and needs {int(targets[sample])} inputs, "
                f"but protocol.max_seq_len is {max_seq_len} ({int((targets > max_seq_len).sum())} of "
                f"{len(length)} samples are too long); raise it, or set protocol.too_long=truncate or "
                "protocol.too_long=window"
            )
        return ceil_div(targets, max_seq_len) if too_long == "window" else (targets > 0).astype(np.int64)

    def locate(length: IntArray, index: IntArray) -> Located:
        start = index * max_seq_len
        score_start = start + 1 - prefix
        return start, score_start, np.minimum(score_start + max_seq_len, length), all_equal(index, prefix)

    def num_targets(length: IntArray) -> IntArray:
        return all_targets(length) if too_long == "window" else np.minimum(all_targets(length), max_seq_len)

    def notes(length: IntArray) -> list[str]:
        targets = all_targets(length)
        long = targets > max_seq_len
        if not long.any():
            return []
        if too_long == "window":
            return [f"{int(long.sum())} of {len(length)} samples are cut into windows (too_long=window)"]
        lost = int((targets - max_seq_len)[long].sum())
        samples = f"{int(long.sum())} of {len(length)} samples"
        return [f"{samples} are truncated: {lost} targets are not scored (too_long=truncate)"]

    return Protocol(
        name="per_sample",
        max_seq_len=max_seq_len,
        parameters={"max_seq_len": max_seq_len, "too_long": too_long, "bos": bos},
        join=None,
        bos=bos,
        num_windows=num_windows,
        locate=locate,
        num_targets=num_targets,
        prefix_rule="bos" if prefix else None,
        notes=notes,
        covers_text=too_long != "truncate",
    )
