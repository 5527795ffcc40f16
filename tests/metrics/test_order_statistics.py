"""Exact percentiles of values on many ranks, against numpy's of all of them."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ppl_eval.metrics.order_statistics import percentiles

PERCENTS = [Fraction(text) for text in ("0", "0.1", "50", "90", "99", "99.9", "100")]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def over_ranks(pieces: list[np.ndarray], num_ranks: int) -> list[list[float]]:
    """Let ranks take turns: what one adds, the others hear in the next round."""
    rounds: list[np.ndarray] = []
    while True:
        sent: list[np.ndarray] = []

        def add(vector: np.ndarray, sent=sent, turns=None) -> np.ndarray:
            turn = len(sent)
            sent.append(vector)
            if turn < len(rounds):
                return rounds[turn]
            raise StopIteration

        found, gathered = [], []
        for rank in range(num_ranks):
            sent.clear()
            try:
                found.append(percentiles(lambda rank=rank: pieces[rank::num_ranks], PERCENTS, add))
            except StopIteration:
                gathered.append(sent[-1].copy())
        if not gathered:
            return found
        rounds.append(np.sum(gathered, axis=0))


@settings(max_examples=40, deadline=None)
@given(st.lists(arrays.arrays(np.float32, st.integers(0, 9), elements=finite), min_size=1, max_size=6))
def test_equal_numpy_and_do_not_depend_on_ranks(pieces: list[np.ndarray]) -> None:
    alone = over_ranks(pieces, 1)[0]
    for num_ranks in (2, 4):
        assert over_ranks(pieces, num_ranks) == [alone] * num_ranks
    values = np.concatenate(pieces).astype(np.float64)
    if not len(values):
        assert alone == []
        return
    expected = np.percentile(values, [float(percent) for percent in PERCENTS])
    scale = np.abs(values).max()
    np.testing.assert_allclose(alone, expected, rtol=1e-12, atol=1e-12 * scale)
    assert (alone[0], alone[-1]) == (values.min(), values.max())


def test_many_values_close_to_each_other_by_hand() -> None:
    # 1,001 neighbouring floats, shuffled: percentile q is the one with number 10 q.
    bits = np.uint32(0x3F7FFF00) + np.arange(1001, dtype=np.uint32)
    values = np.random.default_rng(0).permutation(bits.view(np.float32))
    found = percentiles(lambda: np.split(values, 7), [Fraction(q) for q in range(101)], lambda v: v)
    assert found == bits.view(np.float32)[::10].astype(np.float64).tolist()


def test_memory_does_not_grow_with_the_values() -> None:
    taken = 0

    def walk():
        nonlocal taken
        for seed in range(20):
            taken += 1
            yield np.random.default_rng(seed).random(1000, dtype=np.float32)

    sizes = []
    percentiles(walk, PERCENTS, lambda vector: (sizes.append(vector.size), vector)[1])
    assert taken == 40
    assert len(sizes) == 2
    assert max(sizes) <= 2 * len(PERCENTS) * 2**16


def test_one_value_is_every_percentile() -> None:
    found = percentiles(lambda: [np.array([-2.5], np.float32)], PERCENTS, lambda v: v)
    assert found == [-2.5] * len(PERCENTS)
    assert percentiles(list, PERCENTS, lambda v: v) == pytest.approx([])
