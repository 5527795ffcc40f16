"""Exact totals: integer sums of float64 values, the same bits in any order and any grouping.

A float64 is an integer times a power of two, so a sum of them is exact in integers. Values are added in fixed
point with 96 fractional bits, which holds every float64 of 2^-43 or more without rounding (a smaller one is
rounded at 2^-97), and the sum is rounded to float64 once, when it is read: the same number as ``math.fsum``.
For ``all_reduce`` the integer travels as 32-bit limbs in int64, so that up to 2^31 ranks can be added without
a carry being lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ppl_eval.protocols.base import ScoredSums
from ppl_eval.protocols.coverage import NUM_HASH_SUMS, HashSums

FRACTION_BITS = 96
_LIMB_BITS = 32
_LIMB = 1 << _LIMB_BITS
# 96 fractional bits, 62 bits of value and 2^40 windows, with the sign, fit in 7 limbs.
NUM_LIMBS = 7
NUM_VALUE_LIMBS = 5
# What a sum over a window may not reach.
LARGEST = float(1 << 62)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class TokenComparison(NamedTuple):
    """What a comparison found of each scored token of a batch, in row-major order.

    Attributes:
        reference_nll_N: NLL under the reference, nats; float32.
        kl_N: KL(reference || model), nats; float32.
        reverse_kl_N: KL(model || reference), nats; float32.
        top_rank_N: rank under the model of the reference's most likely token; 1 where both agree; int64.
    """

    reference_nll_N: npt.NDArray[np.float32]
    kl_N: npt.NDArray[np.float32]
    reverse_kl_N: npt.NDArray[np.float32]
    top_rank_N: IntArray


class WindowScores(NamedTuple):
    """What scoring found, one entry a window.

    Attributes:
        nll_sum_B: negative log-likelihood of the scored targets, nats; float64.
        nll_sq_sum_B: sum of the squared per-token NLL, nats^2; float64.
        num_tokens_B: scored targets; int64.
        num_correct_B: scored targets that were the most likely token; int64.
        nll_BT: NLL of each target, nats, 0 where none is scored; float64. None if it is not kept.
        correct_BT: whether each scored target was the most likely token; int64. None likewise.
        details_N: rank, most likely token and entropy of the scored targets (``softmax.token_nll``); empty if
            they were not asked for.
        comparison: the scored targets beside a reference; None without one.
        num_excluded_B: targets of windows that are left out (``finite.exclude``), which are not among the
            scored ones; 0 for all others; int64. None where no window is left out.
        in_parts: whether the batch went through the model in parts, for want of memory.
    """

    nll_sum_B: FloatArray
    nll_sq_sum_B: FloatArray
    num_tokens_B: IntArray
    num_correct_B: IntArray
    nll_BT: FloatArray | None = None
    correct_BT: IntArray | None = None
    details_N: tuple[npt.NDArray[Any], ...] = ()
    comparison: TokenComparison | None = None
    num_excluded_B: IntArray | None = None
    in_parts: bool = False


def joined_scores(parts: Sequence[WindowScores]) -> WindowScores:
    """Return the scores of neighbouring parts of a batch as those of the batch."""
    if len(parts) == 1:
        return parts[0]
    found = [part.comparison for part in parts if part.comparison is not None]
    fields: dict[str, Any] = {
        name: np.concatenate(columns) if all(column is not None for column in columns) else None
        for name in WindowScores._fields
        if name not in ("details_N", "comparison", "in_parts")
        for columns in [[getattr(part, name) for part in parts]]
    }
    details = zip(*(part.details_N for part in parts), strict=True)
    fields["details_N"] = tuple(np.concatenate(columns) for columns in details)
    if found:
        fields["comparison"] = TokenComparison._make(map(np.concatenate, zip(*found, strict=True)))
    return WindowScores(**fields, in_parts=True)


def fixed_limbs(values: FloatArray) -> list[IntArray]:
    """Return float64 values in units of 2^-96 as ``NUM_VALUE_LIMBS`` limbs of 32 bits with the value's sign.

    The most significant limbs come first; each may be added over 2^31 values.
    """
    magnitude = np.abs(values)
    assert np.all(magnitude < LARGEST), (
        "a value of 2^62 or more, or one that is not finite, reached the totals"
    )
    sign = np.where(np.signbit(values), -1, 1).astype(np.int64)
    whole = np.floor(magnitude)
    rest = magnitude - whole
    whole_int = whole.astype(np.int64)
    limbs = [whole_int >> _LIMB_BITS, whole_int & (_LIMB - 1)]
    for last in (False, False, True):
        rest = rest * _LIMB
        digit = np.rint(rest) if last else np.floor(rest)
        rest = rest - digit
        limbs.append(digit.astype(np.int64))
    return [limb * sign for limb in limbs]


def join_value_limbs(limbs: list[int]) -> int:
    """Return the integer that limbs of ``fixed_limbs``, or sums of them, stand for."""
    fixed = 0
    for limb in limbs:
        fixed = fixed * _LIMB + limb
    return fixed


def to_fixed(values: FloatArray) -> int:
    """Return the exact sum of float64 values, as an integer in units of 2^-96.

    Example:
        >>> fixed_to_float(to_fixed(np.array([1e16, 1.0, -1e16])))
        1.0
    """
    return join_value_limbs([int(limb.sum(dtype=np.int64)) for limb in fixed_limbs(values)])


def to_limbs(fixed: int) -> list[int]:
    """Split a (signed) integer into limbs of 32 bits, least significant first; the last one carries the
    sign."""
    limbs = []
    for _ in range(NUM_LIMBS - 1):
        limbs.append(fixed & (_LIMB - 1))
        fixed >>= _LIMB_BITS
    assert -(1 << 31) <= fixed < (1 << 31), "a total outgrew its limbs"
    return [*limbs, fixed]


def from_limbs(limbs: list[int]) -> int:
    """Join limbs, each of which may be a sum over ranks."""
    return sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs))


def fixed_to_float(fixed: int) -> float:
    """Return the float64 nearest to a fixed-point integer; integer division in Python rounds correctly."""
    return fixed / (1 << FRACTION_BITS)


@dataclass
class Totals:
    """Sums over windows, exact, mergeable and reducible as one int64 vector.

    All ``*_fixed`` fields are integers in units of 2^-96.

    Attributes:
        nll_fixed: NLL of all scored targets, nats.
        token_nll_sq_fixed: sum over tokens of the squared NLL, nats^2.
        weighted_nll_fixed: sum over windows of the mean NLL of their tokens times the window's weight, nats;
            for protocols with ``window_weights``.
        window_weights: sum of these weights.
        num_tokens: scored targets.
        num_windows: windows scored.
        num_correct: scored targets that were the most likely token.
        num_excluded_tokens: targets of windows that were left out because their NLL is not finite.
        num_excluded_windows: these windows; the other sums and counts have nothing of them.
        num_windows_in_parts: windows, of either kind, whose batch went through the model in parts.
        scored_hash_sums: set hash of the scored targets (see ``coverage``).
        excluded_hash_sums: set hash of the targets that were left out.
        expected_hash_sums: set hash of the targets that the plan says must be scored.
    """

    nll_fixed: int = 0
    token_nll_sq_fixed: int = 0
    weighted_nll_fixed: int = 0
    window_weights: int = 0
    num_tokens: int = 0
    num_windows: int = 0
    num_correct: int = 0
    num_excluded_tokens: int = 0
    num_excluded_windows: int = 0
    num_windows_in_parts: int = 0
    scored_hash_sums: HashSums = field(default_factory=lambda: np.zeros(NUM_HASH_SUMS, np.uint64))
    excluded_hash_sums: HashSums = field(default_factory=lambda: np.zeros(NUM_HASH_SUMS, np.uint64))
    expected_hash_sums: HashSums = field(default_factory=lambda: np.zeros(NUM_HASH_SUMS, np.uint64))

    def add(self, scores: WindowScores, weights_B: IntArray | None = None) -> None:
        """Add the windows of a batch, with weights (int64) for their means where the protocol has some."""
        tokens = scores.num_tokens_B
        self.nll_fixed += to_fixed(scores.nll_sum_B)
        self.token_nll_sq_fixed += to_fixed(scores.nll_sq_sum_B)
        self.num_tokens += int(tokens.sum())
        self.num_windows += len(tokens)
        self.num_correct += int(scores.num_correct_B.sum())
        if scores.num_excluded_B is not None:
            excluded_B = scores.num_excluded_B > 0
            self.num_excluded_tokens += int(scores.num_excluded_B.sum())
            self.num_excluded_windows += int(excluded_B.sum())
            self.num_windows -= int(excluded_B.sum())
            weights_B = None if weights_B is None else np.where(excluded_B, 0, weights_B)
        if weights_B is not None:
            mean_B = scores.nll_sum_B / np.maximum(tokens, 1)
            self.weighted_nll_fixed += to_fixed(mean_B * weights_B)
            self.window_weights += int(weights_B.sum())

    def pack(self) -> IntArray:
        """Return all sums as one int64 vector, which may be added over ranks elementwise."""
        limbs: list[int] = []
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, int):
                limbs += to_limbs(value)
            else:
                for hash_sum in value:
                    limbs += [int(hash_sum) & (_LIMB - 1), int(hash_sum) >> _LIMB_BITS]
        return np.array(limbs, dtype=np.int64)

    @classmethod
    def unpack(cls, vector: IntArray) -> Totals:
        """Rebuild totals from a sum of ``pack`` vectors."""
        limbs = [int(limb) for limb in vector]
        out = cls()
        for spec in dataclasses.fields(cls):
            if isinstance(getattr(out, spec.name), int):
                setattr(out, spec.name, from_limbs(limbs[:NUM_LIMBS]))
                limbs = limbs[NUM_LIMBS:]
            else:
                pairs, limbs = limbs[: 2 * NUM_HASH_SUMS], limbs[2 * NUM_HASH_SUMS :]
                hash_sums = [from_limbs(pairs[i : i + 2]) % (1 << 64) for i in range(0, len(pairs), 2)]
                setattr(out, spec.name, np.array(hash_sums, dtype=np.uint64))
        assert not limbs
        return out

    @property
    def nll_sum(self) -> float:
        """NLL of all scored targets in nats: the float64 nearest to the exact sum."""
        return fixed_to_float(self.nll_fixed)

    def scored_sums(self, num_words: int) -> ScoredSums:
        """Return what a protocol computes its own figures from."""
        return ScoredSums(
            nll_sum=self.nll_sum,
            nll_sq_sum=fixed_to_float(self.token_nll_sq_fixed),
            num_tokens=self.num_tokens,
            weighted_nll_sum=fixed_to_float(self.weighted_nll_fixed),
            weight_sum=self.window_weights,
            num_words=num_words,
        )

    def ce_loss(self) -> float:
        """Return NLL per scored token in nats, divided once."""
        return self.nll_fixed / (self.num_tokens << FRACTION_BITS)


class FloatSum:
    """The running sum that most tools keep, in float32 or float64: kept selectable so that its drift can be
    seen.

    Args:
        dtype: ``float32`` or ``float64``.
    """

    def __init__(self, dtype: str) -> None:
        self.value = np.dtype(dtype).type(0)

    def add(self, values: FloatArray) -> None:
        """Add values one after the other, rounding after each, as ``running_loss += loss`` does."""
        dtype = self.value.dtype
        # cumsum rounds after every addend, in order; sum would add pairwise.
        self.value = np.cumsum(np.concatenate([[self.value], values]).astype(dtype), dtype=dtype)[-1]


def resolve_precision(precision: str, expected_tokens: int) -> str:
    """Return the accumulation in use: ``auto`` is float64 above 10^6 tokens, else float32."""
    if precision == "auto":
        return "float64" if expected_tokens > 10**6 else "float32"
    return precision
