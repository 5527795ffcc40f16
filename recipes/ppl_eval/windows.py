"""What a window is, and what a protocol must say so that windows can be computed on demand.

A protocol is closed form: how many windows a document of n tokens has, and where window k of it lies. So a
plan of any size is random access, and no list of windows ever exists. Pure: numpy only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

BOS_POLICIES = ("tokenizer", "always", "never", "each_window")


class Windows(NamedTuple):
    """Windows as columns, one entry each; positions count tokens inside the document.

    The sequence of a window is ``s = [prefix token?] + document[start:stop]``; the model's inputs are
    ``s[:-1]``, its targets ``s[1:]``, and targets before ``score_start`` are context only.

    Attributes:
        document: index of the document (a run of tokens that no window crosses).
        start: first position that the model sees.
        score_start: first scored target; equal to ``start`` only where a prefix gives that token a context.
        stop: one past the last target.
        prefix: whether the prefix token stands before position ``start``.
    """

    document: IntArray
    start: IntArray
    score_start: IntArray
    stop: IntArray
    prefix: BoolArray

    @property
    def num_targets(self) -> IntArray:
        """Targets that each window scores, before any label mask."""
        return self.stop - self.score_start

    @property
    def num_inputs(self) -> IntArray:
        """Tokens that the model sees at once in each window."""
        return self.stop - self.start - 1 + self.prefix


@dataclass(frozen=True)
class Protocol:
    """How documents become windows: what a protocol factory returns.

    Attributes:
        name: the factory's name.
        max_seq_len: most tokens that the model sees at once.
        parameters: every parameter, for the result.
        join: text put between documents before the one tokenizer call; None scores every document on its own.
        bos: one of ``BOS_POLICIES``.
        num_windows: windows of documents of the given lengths in tokens; int64 [D] to int64 [D].
        locate: ``(length_K, index_K)`` to ``(start, score_start, stop, prefix)`` of window ``index`` of a
            document of that length.
        num_targets: scored targets of documents of the given lengths, by a formula of its own: the coverage
            check compares it with what the windows scored.
    """

    name: str
    max_seq_len: int
    parameters: dict[str, Any]
    join: str | None
    bos: str
    num_windows: Callable[[IntArray], IntArray]
    locate: Callable[[IntArray, IntArray], tuple[IntArray, IntArray, IntArray, BoolArray]]
    num_targets: Callable[[IntArray], IntArray]


def check_max_seq_len(max_seq_len: int, smallest: int = 2) -> None:
    """Refuse a window length that scores nothing.

    Raises:
        ValueError: if ``max_seq_len`` is below ``smallest``.
    """
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < smallest:
        raise ValueError(
            f"protocol.max_seq_len is {max_seq_len!r}; it must be a whole number of at least {smallest}"
        )


def check_bos(bos: str, allowed: tuple[str, ...] = BOS_POLICIES) -> None:
    """Refuse a BOS policy that the protocol does not know.

    Raises:
        ValueError: if ``bos`` is none of ``allowed``.
    """
    if bos not in allowed:
        raise ValueError(f"protocol.bos is {bos!r}; allowed here: {', '.join(allowed)}")
