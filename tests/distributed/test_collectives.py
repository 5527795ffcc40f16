"""Sums over ranks, flat and by node, and the weighted mean over groups of unequal size."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.processes import run_ranks
from ppl_eval.config.settings import AGGREGATION_KEYS
from ppl_eval.distributed.collectives import adaptive_aggregation, add_over_ranks

NODES = [[0, 2], [1]]
VECTORS = np.array([[1, 2**40, -5], [10, 7, 2**62], [100, -(2**40), 3]], dtype=np.int64)
# Means of groups of 1, 3 and no tokens: (10 x 1 + 2 x 3) / 4 = 4, where a mean of means gives 6.
VALUES = [[10.0], [2.0], []]
WEIGHTS = [[1], [3], []]


@run_ranks(3)
def test_nodes_of_unequal_size_give_the_sum_on_every_rank():
    rank, device = dist.get_rank(), torch.device("cpu")
    for topology in AGGREGATION_KEYS["topology"].allowed:
        add = add_over_ranks(NODES, rank, device, topology)
        found = add(VECTORS[rank])
        assert found.dtype == np.int64
        assert found.tolist() == VECTORS.sum(axis=0).tolist()
        for precision in ("exact", "float64", "float32", "auto"):
            assert adaptive_aggregation(VALUES[rank], WEIGHTS[rank], precision, add) == 4.0
        # On all ranks, though one alone has what is wrong.
        with pytest.raises(ValueError, match="whole numbers"):
            adaptive_aggregation(VALUES[rank], [0.5] if rank == 0 else WEIGHTS[rank], "exact", add)


def test_mean_is_exact_where_floats_are_not():
    values, weights = [0.1] * 10, [1] * 10
    assert adaptive_aggregation(values, weights, "exact") == 0.1
    assert adaptive_aggregation(values, weights, "float64") != 0.1
    big = [2.0**24, 1.0, 1.0]
    assert adaptive_aggregation(big, [1, 1, 1], "float32") == np.float32(2**24) / np.float32(3)


def test_auto_takes_float64_above_a_million_tokens():
    few, many = [10**6 - 1, 1], [10**6, 1]
    values = [0.1, 0.1]
    assert adaptive_aggregation(values, few, "auto") == adaptive_aggregation(values, few, "float32")
    assert adaptive_aggregation(values, many, "auto") == adaptive_aggregation(values, many, "float64")
    assert adaptive_aggregation(values, many, "auto") != adaptive_aggregation(values, many, "float32")


@pytest.mark.parametrize(("weights", "words"), [([0, 0], "zero"), ([1.5, 1], "whole"), ([-1, 2], "whole")])
def test_weights_that_make_no_mean(weights, words):
    with pytest.raises(ValueError, match=words):
        adaptive_aggregation([1.0, 2.0], weights)
