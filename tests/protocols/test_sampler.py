"""Which batches a rank runs, by property."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ppl_eval.protocols.sampler import DUMMY_BATCH, batches_of, chunk_bounds


def test_by_hand():
    assert list(batches_of(1, 3, range(7))) == [1, 4]
    assert list(batches_of(0, 3, range(7), equal_steps=True)) == [0, 3, 6]
    assert list(batches_of(1, 3, range(7), equal_steps=True)) == [1, 4, DUMMY_BATCH]


@given(st.integers(0, 30), st.integers(1, 7), st.booleans())
def test_every_batch_runs_once(num_batches, num_replicas, equal_steps):
    steps = [list(batches_of(r, num_replicas, range(num_batches), equal_steps)) for r in range(num_replicas)]
    assert sorted(b for run in steps for b in run if b != DUMMY_BATCH) == list(range(num_batches))
    if equal_steps:
        assert {len(run) for run in steps} == {-(-num_batches // num_replicas)}
    else:
        assert all(b != DUMMY_BATCH for run in steps for b in run)


@given(st.integers(0, 100_000), st.integers(1, 1100))
def test_chunks_cover_all_steps_and_shrink(num_steps, num_takers):
    bounds = chunk_bounds(num_steps, num_takers)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, num_steps)
    assert sizes == sorted(sizes, reverse=True)
    assert all(size >= 1 for size in sizes)
    assert not sizes or sizes[0] <= max(1, num_steps / num_takers / 8)
