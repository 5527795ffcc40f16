"""Overlapping evaluation, as in Megatron-LM."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_eval.protocols.base import (
    IntArray,
    Located,
    Protocol,
    ScoredSums,
    all_equal,
    ceil_div,
    check_whole_number,
    exp_or_infinity,
)


@dataclass(frozen=True)
class Megatron(Protocol):
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
        special_tokens: ``parse`` or ``text``, see ``Protocol``.

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int
    overlap_stride: int | None = None
    join: str = ""
    bos: str = "never"
    special_tokens: str = "parse"
    word_separator = "space"

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_whole_number("overlap_stride", self._step, 1, self.max_seq_len)

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter, for the result, with O as a number."""
        return {**super().parameters, "overlap_stride": self._step}

    @property
    def _step(self) -> int:
        return self.max_seq_len if self.overlap_stride is None else self.overlap_stride

    def num_windows(self, length: IntArray) -> IntArray:
        """Count windows up to the first that reaches the end."""
        return (length > 1) + ceil_div(np.maximum(length - 1 - self.max_seq_len, 0), self._step)

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows O apart; each but the first scores its last O targets."""
        start = index * self._step
        score_start = start + 1 + np.where(index == 0, 0, self.max_seq_len - self._step)
        stop = np.minimum(start + self.max_seq_len + 1, length)
        return start + self.each_window, score_start, stop, all_equal(index, self.each_window)

    def num_targets(self, length: IntArray) -> IntArray:
        """Count all tokens but the first."""
        return np.maximum(length - 1, 0)

    def figures(self, sums: ScoredSums) -> dict[str, float]:
        """Return ``adjusted_perplexity``, where the text has at least two words."""
        if sums.num_words < 2:
            return {}
        return {"adjusted_perplexity": exp_or_infinity(sums.nll_sum / (sums.num_words - 1))}
