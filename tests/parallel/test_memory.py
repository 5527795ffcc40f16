"""What splitting saves: memory per rank, measured."""

import pytest
import torch

from helpers.memory import measure_activations, measure_load, measure_shards
from helpers.processes import on_ranks

pytestmark = pytest.mark.slow


def test_a_rank_keeps_its_share_and_borrows_a_layer():
    for found in on_ranks(measure_shards, 4):
        assert found["kept"] < 0.25 * found["model"] + 5
        assert found["peak"] - found["kept"] < 1.5 * found["layer"]


def test_activations_of_a_long_window_fall_with_cp_and_grow_linearly():
    alone = on_ranks(measure_activations, 1, 32768)[0]
    assert max(on_ranks(measure_activations, 4, 32768)) <= 0.35 * alone
    assert max(on_ranks(measure_activations, 2, 32768)) < 2.3 * max(on_ranks(measure_activations, 2, 16384))


def test_loading_takes_little_more_than_the_checkpoint(smollm2):
    found = on_ranks(measure_load, 4, str(smollm2), torch.bfloat16)[0]
    assert found["samples"] >= 3
    assert found["peak"] - found["before"] < 1.6 * found["checkpoint"]
