"""Degrees of parallelism: inferred, checked, and mapped to ranks."""

from types import SimpleNamespace

import pytest

from ppl_eval.parallel.parallel_dims import CONFIG_KEYS, ParallelDims


@pytest.mark.parametrize(
    ("given", "degrees"),
    [
        ((1, -1, 1, 1, 8), (1, 8, 1, 1)),
        ((-1, 1, 1, 1, 8), (8, 1, 1, 1)),
        ((2, -1, 2, 2, 16), (2, 2, 2, 2)),
        ((-1, 2, 1, 3, 12), (2, 2, 1, 3)),
        ((1, 1, 1, 1, 1), (1, 1, 1, 1)),
    ],
)
def test_one_data_degree_is_inferred(given, degrees):
    assert ParallelDims(*given).degrees == degrees


def test_a_wrong_product_is_shown_with_the_nearest_degrees_that_fit():
    with pytest.raises(ValueError, match="= 6, but there are 8 processes") as failure:
        ParallelDims(1, 3, 1, 2, 8)
    message = str(failure.value)
    assert "data_parallel_shard_dim 3 x context_parallel_dim 1 x tensor_parallel_dim 2" in message
    # Of all that fit, the one that changes one degree by the least comes first.
    assert message.split("fit 8: ")[1].split("; ")[0] == "data_parallel_shard_dim=4"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1, -1, 1, 3, 8), "= 6, but there are 8 processes"),
        ((1, -1, 1, 16, 8), "= 16, but there are 8 processes"),
        ((-1, -1, 1, 1, 8), "are both -1"),
        ((1, 1, -1, 1, 8), "context_parallel_dim is -1; it must be a positive number"),
        ((1, 0, 1, 8, 8), "data_parallel_shard_dim is 0"),
        ((1, 1, 1, 1.5, 8), "tensor_parallel_dim is 1.5"),
    ],
)
def test_degrees_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims(*given)


def test_peers_share_a_data_rank_and_one_of_them_counts():
    dims = ParallelDims(2, 2, 2, 2, 16)
    assert [dims.dp_rank(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [rank for rank in range(16) if dims.is_counted(rank)] == [0, 4, 8, 12]
    assert dims.dp_degree == 4


def test_only_copies_make_forwards_of_their_own():
    assert not ParallelDims(4, 1, 1, 1, world_size=4).forwards_are_shared
    for degrees in ((2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)):
        assert ParallelDims(*degrees, world_size=4).forwards_are_shared


@pytest.mark.parametrize(
    ("replicate", "shard", "degrees"),
    [(None, 1, (8, 1)), (None, -1, (1, 8)), (None, 4, (2, 4)), (2, -1, (2, 4))],
)
def test_without_a_replicate_key_copies_take_what_is_left(replicate, shard, degrees):
    settings = SimpleNamespace(**dict(zip(CONFIG_KEYS.values(), (replicate, shard, 1, 1), strict=True)))
    assert ParallelDims.from_settings(settings, 8).degrees[:2] == degrees


@pytest.mark.parametrize("degrees", [(1, 1, 1, 2), (1, 2, 1, 1)])
def test_quantised_weights_are_not_split(degrees):
    with pytest.raises(ValueError, match="data_parallel_replicate_dim: -1"):
        ParallelDims(*degrees, 2).check_quantized()
    ParallelDims(2, 1, 1, 1, 2).check_quantized()
    ParallelDims(1, 1, 2, 1, 2).check_quantized()
