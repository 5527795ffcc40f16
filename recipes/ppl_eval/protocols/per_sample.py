"""One sample, one window: the validation loss of a training run."""

from dataclasses import dataclass

import numpy as np

from ppl_eval.protocols.base import (
    IntArray,
    Located,
    Protocol,
    all_equal,
    ceil_div,
    check_choice,
)


@dataclass(frozen=True)
class PerSample(Protocol):
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
        special_tokens: ``parse`` or ``text``, see ``Protocol``.

    Raises:
        ValueError: for a parameter out of range, and, when windows are counted, for a sample that is too
            long.
    """

    max_seq_len: int
    too_long: str = "error"
    bos: str = "tokenizer"
    special_tokens: str = "parse"

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        check_choice("too_long", self.too_long, ("error", "truncate", "window"))

    @property
    def covers_text(self) -> bool:
        """Whether nothing is truncated."""
        return self.too_long != "truncate"

    def num_windows(self, length: IntArray) -> IntArray:
        """Count one window for each sample that has a target, or the windows that it is cut into."""
        targets = self._all_targets(length)
        if self.too_long == "error":
            self._check_fit(length, targets)
        if self.too_long == "window":
            return ceil_div(targets, self.max_seq_len)
        return (targets > 0).astype(np.int64)

    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows of at most ``max_seq_len`` targets, side by side."""
        start = index * self.max_seq_len
        score_start = start + 1 - self.each_window
        stop = np.minimum(score_start + self.max_seq_len, length)
        return start, score_start, stop, all_equal(index, self.each_window)

    def num_targets(self, length: IntArray) -> IntArray:
        """Count all tokens but the first, up to ``max_seq_len`` where samples are truncated."""
        targets = self._all_targets(length)
        return targets if self.too_long == "window" else np.minimum(targets, self.max_seq_len)

    def notes(self, length: IntArray) -> list[str]:
        """Return how many samples are cut into windows or truncated."""
        targets = self._all_targets(length)
        long = targets > self.max_seq_len
        if not long.any():
            return []
        samples = f"{int(long.sum())} of {len(length)} samples"
        if self.too_long == "window":
            return [f"{samples} are cut into windows (too_long=window)"]
        lost = int((targets - self.max_seq_len)[long].sum())
        return [f"{samples} are truncated: {lost} targets are not scored (too_long=truncate)"]

    def _all_targets(self, length: IntArray) -> IntArray:
        return length if self.each_window else np.maximum(length - 1, 0)

    def _check_fit(self, length: IntArray, targets: IntArray) -> None:
        too_long = targets > self.max_seq_len
        if not too_long.any():
            return
        sample = int(targets.argmax())
        raise ValueError(
            f"sample {sample} has {int(length[sample])} tokens and needs {int(targets[sample])} inputs, "
            f"but protocol.max_seq_len is {self.max_seq_len} ({int(too_long.sum())} of {len(length)} samples "
            "are too long); raise it, or set protocol.too_long=truncate or protocol.too_long=window"
        )
