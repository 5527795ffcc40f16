"""The second half of each chunk, as in llama.cpp."""

from dataclasses import dataclass

from ppl_eval.protocols.base import (
    IntArray,
    Located,
    Protocol,
    ScoredSums,
    all_equal,
    exp_or_infinity,
    tail_note,
)


@dataclass(frozen=True)
class LlamaCpp(Protocol):
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
        special_tokens: ``parse`` or ``text``, see ``Protocol``; the tool does not parse them.

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int = 512
    join: str = ""
    bos: str = "tokenizer"
    special_tokens: str = "text"
    bos_policies = ("tokenizer", "always", "never")
    smallest_max_seq_len = 3
    covers_text = False

    def for_tokenizer(self, adds_bos: bool) -> "LlamaCpp":
        """Return the protocol without BOS where ``bos`` leaves it to a tokenizer that adds none."""
        if self.bos != "tokenizer" or adds_bos:
            return self
        return _WithoutBos(**self.parameters)

    @property
    def prefix_rule(self) -> str | None:
        """``bos``, unless first tokens stay as they are."""
        return "bos" if self._bos_first else None

    @property
    def _bos_first(self) -> bool:
        # Until the tokenizer is known it is taken to add BOS: a forgotten `for_tokenizer` then fails for want
        # of a prefix token, instead of scoring other windows.
        return self.bos != "never"

    @property
    def _first_scored(self) -> int:
        return self.max_seq_len // 2 + 1

    def num_windows(self, length: IntArray) -> IntArray:
        """Count whole chunks."""
        return length // self.max_seq_len

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate chunks side by side, BOS in place of each one's first token."""
        chunk = index * self.max_seq_len
        start, score_start = chunk + self._bos_first, chunk + self._first_scored
        return start, score_start, chunk + self.max_seq_len, all_equal(index, self._bos_first)

    def num_targets(self, length: IntArray) -> IntArray:
        """Count the second half of each whole chunk."""
        return length // self.max_seq_len * (self.max_seq_len - self._first_scored)

    def notes(self, length: IntArray) -> list[str]:
        """Return how many tokens are dropped after the last whole chunk."""
        return tail_note(length, self.max_seq_len)

    def figures(self, sums: ScoredSums) -> dict[str, float]:
        """Return the +/- that the tool prints."""
        mean = sums.nll_sum / sums.num_tokens
        variance = max(sums.nll_sq_sum / sums.num_tokens - mean * mean, 0.0)
        stderr = (variance / max(sums.num_tokens - 1, 1)) ** 0.5
        return {"perplexity_stderr_llama_cpp": exp_or_infinity(mean) * stderr}


class _WithoutBos(LlamaCpp):
    # The chunks as they are, for a tokenizer that adds no BOS; the same parameters.
    name = "llama_cpp"
    _bos_first = False
