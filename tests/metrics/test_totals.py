"""Exact totals: hand numbers, math.fsum, any order and grouping, and the drift of the sums that are not
exact."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval.metrics import totals as t
from ppl_eval.metrics.totals import FloatSum, Totals, WindowScores

nats = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 2**-40)


def scores(nll, tokens):
    nll = np.array(nll, dtype=np.float64)
    tokens = np.array(tokens, dtype=np.int64)
    return WindowScores(nll, nll**2 / np.maximum(tokens, 1), tokens, tokens // 2)


@given(st.lists(nats, max_size=50))
def test_fixed_point_sum_is_fsum(values):
    assert t.fixed_to_float(t.to_fixed(np.array(values, dtype=np.float64))) == math.fsum(values)


def test_smallest_unit_is_rounded_not_lost():
    assert t.to_fixed(np.array([2.0**-96])) == 1
    assert t.to_fixed(np.array([-(2.0**-96)])) == -1
    assert t.to_fixed(np.array([2.0**-200])) == 0


@given(st.integers(min_value=-(1 << 200), max_value=1 << 200))
def test_limbs_round_trip(value):
    assert t.from_limbs(t.to_limbs(value)) == value


@given(
    st.lists(st.tuples(nats, st.integers(1, 10**6)), min_size=1, max_size=40), st.randoms(), st.integers(1, 4)
)
def test_any_order_and_grouping_gives_the_same_bits(windows, random, num_ranks):
    whole = Totals()
    whole.add(scores(*zip(*windows, strict=True)))
    shuffled = list(windows)
    random.shuffle(shuffled)
    vectors = []
    for rank in range(num_ranks):  # the last ranks may have nothing at all
        part = Totals()
        for window in shuffled[rank::num_ranks]:
            part.add(scores([window[0]], [window[1]]))
        vectors.append(part.pack())
    assert np.array_equal(Totals.unpack(np.sum(vectors, axis=0)).pack(), whole.pack())


def test_set_hash_travels_with_the_totals():
    a, b = Totals(), Totals()
    a.scored_hash_sums += np.array([2**64 - 1, 1, 2**63, 0], dtype=np.uint64)
    b.scored_hash_sums += np.array([2, 1, 2**63, 0], dtype=np.uint64)
    assert Totals.unpack(a.pack() + b.pack()).scored_hash_sums.tolist() == [1, 2, 0, 0]


def test_hand_numbers():
    found = Totals()
    found.add(scores([2.0, 6.0], [1, 2]))
    assert (found.nll_sum, found.num_tokens, found.num_windows) == (8.0, 3, 2)
    assert found.ce_loss() == 8 / 3


def test_ce_loss_divides_the_exact_sum_once():
    found = Totals()
    found.add(scores([0.1] * 10, [1] * 10))
    assert found.ce_loss() == float(Fraction(0.1))


def test_drift_of_every_precision_over_ten_million_windows(capsys):
    """The table of docs/exactness.md: 10^7 windows of 2,047 tokens at 2.9 nats, spread as real windows
    are."""
    random = np.random.default_rng(0)
    values = random.normal(2.9 * 2047, 0.35 * 2047, size=10**7).clip(1.0)
    exact = math.fsum(values.tolist())
    fixed = sum(t.to_fixed(chunk) for chunk in np.split(values, 100))
    assert t.fixed_to_float(fixed) == exact
    drift = {}
    for precision in ("float64", "float32"):
        running = FloatSum(precision)
        for chunk in np.split(values, 100):
            running.add(chunk)
        drift[precision] = abs(float(running.value) - exact) / exact
    with capsys.disabled():
        print(
            f"\n  drift over 10^7 windows: exact 0, float64 {drift['float64']:.2e}, float32"
            f" {drift['float32']:.2e}"
        )
    assert 0 < drift["float64"] < 1e-11
    assert drift["float32"] > 1e-3, "a float32 sum stalls once a window is less than half its last digit"


def test_auto_precision():
    assert t.resolve_precision("auto", 10**6) == "float32"
    assert t.resolve_precision("auto", 10**6 + 1) == "float64"
    assert t.resolve_precision("exact", 10**9) == "exact"


def test_float_sum_rounds_after_every_addend():
    running = FloatSum("float32")
    running.add(np.array([2.0**24, 1.0, 1.0]))
    assert running.value == 2.0**24
