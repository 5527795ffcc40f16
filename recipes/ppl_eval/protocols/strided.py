"""Overlapping windows, as in the transformers documentation."""

from dataclasses import dataclass

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
    check_choice,
    check_whole_number,
    exp_or_infinity,
)


@dataclass(frozen=True)
class Strided(Protocol):
    """Overlapping windows, as the transformers documentation's page on perplexity scores them.

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
        special_tokens: ``parse`` or ``text``, see ``Protocol``.

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int
    stride: int
    weighting: str = "exact"
    join: str = "\n\n"
    bos: str = "tokenizer"
    special_tokens: str = "parse"
    smallest_max_seq_len = 2

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_whole_number("stride", self.stride, 1, self.max_seq_len)
        check_choice("weighting", self.weighting, ("exact", "hf_doc"))

    @property
    def bos_policies(self) -> tuple[str, ...]:
        """All policies; for ``hf_doc`` those that the script can have, as it puts no BOS anywhere itself."""
        return ("tokenizer", "always", "never") if self._as_published else BOS_POLICIES

    @property
    def denominator(self) -> str:
        """What the NLL is divided by, in words, for the result."""
        return "window means weighted by t-1" if self._as_published else "scored tokens"

    @property
    def _as_published(self) -> bool:
        return self.weighting == "hf_doc"

    def num_windows(self, length: IntArray) -> IntArray:
        """Count windows up to the first that reaches the end, unless it has nothing to score."""
        last = ceil_div(np.maximum(length - self.max_seq_len, 0), self.stride)
        return last + 1 - (length - last * self.stride < 2 - self.each_window)

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows a stride apart; each scores what lies past the end of the one before."""
        start = index * self.stride
        previous_stop = np.where(index == 0, 0, start - self.stride + self.max_seq_len)
        score_start = np.maximum(previous_stop, start + 1 - self.each_window)
        stop = np.minimum(start + self.max_seq_len, length)
        return start, score_start, stop, all_equal(index, self.each_window)

    def num_targets(self, length: IntArray) -> IntArray:
        """Count all tokens but the first, or but the first of each window where windows do not overlap."""
        if self.each_window:
            return length
        if self.stride < self.max_seq_len:
            return np.maximum(length - 1, 0)
        return length - ceil_div(length, self.max_seq_len)

    def window_weights(self, windows: Windows) -> IntArray | None:
        """Return t - 1 of each window for ``hf_doc``."""
        if not self._as_published:
            return None
        return windows.num_targets - ((windows.start > 0) & (self.stride < self.max_seq_len))

    def figures(self, sums: ScoredSums) -> dict[str, float]:
        """Return what the script prints for ``hf_doc``, and the exact perplexity beside it."""
        if not self._as_published:
            return {}
        ce_loss = sums.weighted_nll_sum / sums.weight_sum
        exact = exp_or_infinity(sums.nll_sum / sums.num_tokens)
        return {
            "ce_loss": ce_loss,
            "perplexity": exp_or_infinity(ce_loss),
            "perplexity_exact_weighting": exact,
        }
