"""What a window is, and what a protocol must say so that windows can be computed on demand.

A protocol is closed form: how many windows a document of n tokens has, and where window k of it lies. So a
plan of any size is random access, and no list of windows ever exists. Pure: numpy only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
# start, score_start, stop and prefix of windows
Located = tuple[IntArray, IntArray, IntArray, BoolArray]

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


class ScoredSums(NamedTuple):
    """What a protocol may compute figures of its own from, each value the float64 nearest to an exact sum.

    Attributes:
        nll_sum: NLL of all scored targets, nats.
        nll_sq_sum: sum over tokens of the squared NLL, nats^2.
        num_tokens: scored targets.
        weighted_nll_sum: sum over windows of the window's mean NLL times its weight (see
            ``Protocol.window_weights``).
        weight_sum: sum of these weights.
        num_words: words of the original text, counted as ``Protocol.word_separator`` says.
    """

    nll_sum: float
    nll_sq_sum: float
    num_tokens: int
    weighted_nll_sum: float
    weight_sum: int
    num_words: int


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
        denominator: what the NLL is divided by, in words, for the result.
        prefix_rule: which token stands before windows with a prefix: ``bos``, ``bos_or_eos`` (BOS, or EOS
            where the tokenizer has no BOS), or None where no window has one.
        word_separator: what parts words where this protocol's reference counts them: ``white_space``
            (lm-eval) or ``space`` (Megatron).
        covers_text: whether all but a few tokens between the head of a document and its last scored target
            are scored, so that NLL per byte and per word of it mean something.
        notes: document lengths to what a reader of the result must know about them (dropped tails, truncated
            samples).
        window_weights: weight of each window's mean NLL, for a reference that averages window means.
        figures: further figures for the result, or replacements of its ``ce_loss`` and ``perplexity``.
        for_tokenizer: the protocol for a tokenizer that adds BOS (True) or not (False), where windows depend
            on that.
    """

    name: str
    max_seq_len: int
    parameters: dict[str, Any]
    join: str | None
    bos: str
    num_windows: Callable[[IntArray], IntArray]
    locate: Callable[[IntArray, IntArray], Located]
    num_targets: Callable[[IntArray], IntArray]
    denominator: str = "scored tokens"
    prefix_rule: str | None = None
    word_separator: str = "white_space"
    covers_text: bool = True
    notes: Callable[[IntArray], list[str]] | None = None
    window_weights: Callable[[Windows], IntArray] | None = None
    figures: Callable[[ScoredSums], dict[str, float]] | None = None
    for_tokenizer: Callable[[bool], "Protocol"] | None = None


def check_max_seq_len(max_seq_len: int, smallest: int = 2) -> None:
    """Refuse a window length that scores nothing.

    Raises:
        ValueError: if ``max_seq_len`` is below ``smallest``.
    """
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < smallest:
        raise ValueError(
            f"protocol.max_seq_len is {max_seq_len!r}; it must be a whole number of at least {smallest}"
        )


def check_between(key: str, value: int, smallest: int, largest: int) -> None:
    """Refuse a parameter that is no whole number within a range.

    Raises:
        ValueError: if ``value`` is not in [smallest, largest].
    """
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise ValueError(
            f"protocol.{key} is {value!r}; it must be a whole number from {smallest} to {largest}"
        )


def check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a parameter that is none of the allowed words.

    Raises:
        ValueError: if ``value`` is none of ``allowed``.
    """
    if value not in allowed:
        raise ValueError(f"protocol.{key} is {value!r}; allowed: {', '.join(allowed)}")


def check_bos(bos: str, allowed: tuple[str, ...] = BOS_POLICIES) -> None:
    """Refuse a BOS policy that the protocol does not know.

    Raises:
        ValueError: if ``bos`` is none of ``allowed``.
    """
    if bos not in allowed:
        raise ValueError(f"protocol.bos is {bos!r}; allowed here: {', '.join(allowed)}")


def ceil_div(numerator: IntArray, denominator: int) -> IntArray:
    """Quotients rounded up."""
    return -(-numerator // denominator)


def all_equal(index: IntArray, value: bool) -> BoolArray:
    """The same flag for all of these windows."""
    return np.full(len(index), value, dtype=np.bool_)


def exp_or_infinity(value: float) -> float:
    """``exp``, with infinity where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def tail_note(length: IntArray, max_seq_len: int) -> list[str]:
    """What a result says where only whole windows are scored."""
    dropped = int((length % max_seq_len).sum())
    if not dropped:
        return []
    return [f"{dropped} tokens after the last whole window are not scored, as in the protocol's reference"]
