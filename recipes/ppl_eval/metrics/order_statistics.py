"""Exact percentiles of values that lie on many ranks, in flat memory.

A value's place in the order is found digit by digit: ranks count how many values begin with each 16-bit
prefix, add the counts up, and then count the second half of those that begin as the wanted ones do. Two walks
over the values, and two sums of integers: the same bits for any number of ranks, and no sketch.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ppl_eval.protocols.base import IntArray

Float32Array = npt.NDArray[np.float32]
AddOverRanks = Callable[[IntArray], IntArray]
_HALF_BITS = 16
_HALF = 1 << _HALF_BITS
_SIGN = np.uint32(1 << 31)


def percentiles(
    walk: Callable[[], Iterable[Float32Array]], percents: Sequence[Fraction], add_over_ranks: AddOverRanks
) -> list[float]:
    """Return percentiles of the values of all ranks; every rank must call it.

    Percentile q of N values lies at q/100 * (N - 1) in their order, counted from 0; between two values it is
    interpolated linearly, as numpy does by default and llama-perplexity too.

    Args:
        walk: returns this rank's values, finite, in pieces; called twice.
        percents: from 0 (the smallest) to 100 (the largest).
        add_over_ranks: sums an int64 vector over ranks.

    Returns:
        One number for each; none where there are no values.

    Example:
        >>> values = np.array([4, 1, 3, 2], dtype=np.float32)
        >>> percentiles(lambda: [values], [Fraction(50), Fraction(100)], lambda vector: vector)
        [2.5, 4.0]
    """
    counts = np.zeros(_HALF, dtype=np.int64)
    for values in walk():
        counts += np.bincount(_in_order(values) >> _HALF_BITS, minlength=_HALF)
    counts = add_over_ranks(counts)
    num_values = int(counts.sum())
    if not num_values:
        return []
    places = [percent * (num_values - 1) / 100 for percent in percents]
    wanted = sorted({n for place in places for n in (int(place), min(int(place) + 1, num_values - 1))})
    found = dict(zip(wanted, _at(walk, wanted, counts, add_over_ranks), strict=True))
    return [
        _between(found[int(place)], found[min(int(place) + 1, num_values - 1)], place - int(place))
        for place in places
    ]


def _at(
    walk: Callable[[], Iterable[Float32Array]],
    wanted: Sequence[int],
    counts: IntArray,
    add_over_ranks: AddOverRanks,
) -> list[float]:
    """Return the values at these places in the order, given how many begin with each prefix."""
    ends = np.cumsum(counts)
    prefix_K = np.searchsorted(ends, wanted, side="right")
    prefixes = np.unique(prefix_K)
    second = np.zeros((len(prefixes), _HALF), dtype=np.int64)
    for values in walk():
        ordered = _in_order(values)
        high = ordered >> _HALF_BITS
        row = np.minimum(np.searchsorted(prefixes, high), len(prefixes) - 1)
        here = prefixes[row] == high
        place = row[here] * _HALF + (ordered[here] & (_HALF - 1))
        second += np.bincount(place, minlength=second.size).reshape(second.shape)
    second = add_over_ranks(second.ravel()).reshape(second.shape)
    found = []
    for place, prefix in zip(wanted, prefix_K, strict=True):
        inside = place - int(ends[prefix] - counts[prefix])
        ends_here = np.cumsum(second[np.searchsorted(prefixes, prefix)])
        low = int(np.searchsorted(ends_here, inside, side="right"))
        found.append(_from_order((int(prefix) << _HALF_BITS) | low))
    return found


def _in_order(values: Float32Array) -> IntArray:
    """Return integers below 2^32 in the order of the values; -0 comes just before 0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.int64)


def _from_order(ordered: int) -> float:
    bits = np.uint32(ordered)
    bits = bits ^ _SIGN if bits & _SIGN else ~bits
    return float(bits.view(np.float32))


def _between(low: float, high: float, share: Fraction) -> float:
    return low if low == high else float(Fraction(low) * (1 - share) + Fraction(high) * share)
