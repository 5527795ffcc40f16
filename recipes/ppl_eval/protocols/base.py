"""What a window is, and what a protocol must say so that windows can be computed on demand.

A protocol is closed form: how many windows a document of n tokens has, and where window k of it lies. So a
plan of any size is random access, and no list of windows ever exists. Pure: numpy only.

Notation in all protocols: a document has tokens x0..x(n-1), L = ``max_seq_len``, and l_i = -ln p(x_i | the
context inside its window). All perplexities are exp(sum of l / denominator). ``bos`` says where BOS goes:
``tokenizer`` (where the model's own tokenizer call puts it), ``always`` (once, at the head of the stream or
document), ``never``, or ``each_window`` (before every window, never at the head as well); the default is what
the reference does.
"""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ppl_eval.tokenization.encoders import SPECIAL_TOKENS

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
class Protocol(ABC):
    """How documents become windows.

    A protocol is a frozen dataclass whose fields are its parameters, so that a config's ``protocol`` section
    builds it and ``parameters`` goes into the result. A subclass defines ``num_windows``, ``locate`` and
    ``num_targets``, and overrides what else differs from the defaults here, by a class attribute, a field or
    a property. docs/protocols.md shows one in full.

    Attributes:
        max_seq_len: most tokens that the model sees at once.
        bos: one of ``bos_policies``.
        special_tokens: what becomes of names of special tokens in a text: ``parse`` makes them the tokens
            that they name, ``text`` spells them in letters.
        join: text put between documents before the one tokenizer call; None scores every document on its own.
        smallest_max_seq_len: the smallest ``max_seq_len`` that scores anything.
        word_separator: what separates words where this protocol's reference counts them: ``white_space``
            (lm-eval) or ``space`` (Megatron).

    Raises:
        ValueError: for a parameter out of range.
    """

    max_seq_len: int
    # Without annotations, so that these are fields only of protocols that have them as parameters.
    bos = "tokenizer"
    special_tokens = "parse"
    join = cast("str | None", None)
    smallest_max_seq_len = 1
    word_separator = "white_space"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_whole_number("max_seq_len", self.max_seq_len, self.smallest_max_seq_len)
        check_choice("bos", self.bos, self.bos_policies)
        check_choice("special_tokens", self.special_tokens, SPECIAL_TOKENS)

    @property
    def name(self) -> str:
        """Name in the result: the class's, in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def parameters(self) -> dict[str, Any]:
        """Every parameter, for the result."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def bos_policies(self) -> tuple[str, ...]:
        """The values of ``bos`` that the protocol allows."""
        return BOS_POLICIES

    @property
    def prefix_rule(self) -> str | None:
        """Which token stands before windows with a prefix: ``bos``, ``bos_or_eos`` (BOS, or EOS where the
        tokenizer has no BOS), or None where no window has one."""
        return "bos" if self.each_window else None

    @property
    def each_window(self) -> bool:
        """Whether ``bos`` asks for BOS before each window."""
        return self.bos == "each_window"

    @property
    def denominator(self) -> str:
        """What the NLL is divided by, in words, for the result."""
        return "scored tokens"

    @property
    def covers_text(self) -> bool:
        """Whether all but a few tokens between the head of a document and its last scored target are scored,
        so that NLL per byte and per word of it mean something."""
        return True

    @abstractmethod
    def num_windows(self, length: IntArray) -> IntArray:
        """Count the windows of documents of the given lengths in tokens; int64 [D] to int64 [D]."""

    @abstractmethod
    def locate(self, length: IntArray, index: IntArray) -> Located:
        """Locate windows inside their documents.

        Args:
            length: tokens of each window's document; int64 [K].
            index: number of each window in its document; int64 [K].

        Returns:
            ``(start, score_start, stop, prefix)`` as in ``Windows``, each [K].
        """

    @abstractmethod
    def num_targets(self, length: IntArray) -> IntArray:
        """Count the scored targets of documents of the given lengths; int64 [D] to int64 [D].

        By a formula of its own that does not look at windows: the coverage check compares it with what the
        windows scored.
        """

    def notes(self, length: IntArray) -> list[str]:
        """Return what a reader of the result must know: dropped tails, truncated samples."""
        return []

    def window_weights(self, windows: Windows) -> IntArray | None:
        """Return the weight of each window's mean NLL, int64, for a reference that averages means."""
        return None

    def figures(self, sums: ScoredSums) -> dict[str, float]:
        """Return further figures for the result, or replacements of its ``ce_loss`` and ``perplexity``."""
        return {}

    def for_tokenizer(self, adds_bos: bool) -> "Protocol":
        """Return the protocol for a tokenizer that adds BOS or does not; most do not depend on it."""
        return self


def check_whole_number(key: str, value: int, smallest: int, largest: int | None = None) -> None:
    """Refuse a parameter that is not a whole number, or out of range.

    Args:
        key: the parameter's name.
        value: what was given for it.
        smallest: the smallest allowed value.
        largest: the largest allowed value, or None for no limit.

    Raises:
        ValueError: if ``value`` is not allowed.
    """
    allowed = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < smallest or (largest is not None and value > largest):
        raise ValueError(f"protocol.{key} is {value!r}; it must be a whole number {allowed}")


def check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a parameter that is not one of the allowed words.

    Raises:
        ValueError: if ``value`` is not in ``allowed``.
    """
    if value not in allowed:
        raise ValueError(f"protocol.{key} is {value!r}; allowed: {', '.join(allowed)}")


def ceil_div(numerator: IntArray, denominator: int) -> IntArray:
    """Divide and round up."""
    return -(-numerator // denominator)


def all_equal(index: IntArray, value: bool) -> BoolArray:
    """Return the same flag for each of these windows."""
    return np.full(len(index), value, dtype=np.bool_)


def exp_or_infinity(value: float) -> float:
    """Return ``exp(value)``, or infinity where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def tail_note(length: IntArray, max_seq_len: int) -> list[str]:
    """Return the note of a protocol that scores whole windows only."""
    dropped = int((length % max_seq_len).sum())
    if not dropped:
        return []
    return [f"{dropped} tokens after the last whole window are not scored, as in the protocol's reference"]
