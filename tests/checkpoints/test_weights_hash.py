"""The hash of the weights: every byte counts, and shards add up to the whole."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.models import on_meta, random_weights
from helpers.processes import run_ranks
from ppl_eval.checkpoints import weights_hash
from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.run.weights import combine
from ppl_eval.scoring.split import split_model


def hash_of(tensors, threads=1):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weights = WeightsHash()
    torch.set_num_threads(before)
    for name, tensor in tensors.items():
        with weights.reading(name, tensor):
            pass
    weights.close()
    assert weights.read == weights.counted
    return weights.read


def test_bytes_names_dtypes_and_shapes_count_and_order_does_not(monkeypatch):
    monkeypatch.setattr(weights_hash, "BLOCK_BYTES", 64)
    torch.manual_seed(0)
    a, b = torch.randn(10, 7), torch.randn(33)
    found = hash_of({"a": a, "b": b})
    assert hash_of({"b": b, "a": a}, threads=3) == found
    strided = torch.empty(7, 10).T.copy_(a)
    assert hash_of({"a": strided, "b": b}) == found, "the values count, not how they lie in memory"
    flipped = a.clone()
    flipped.view(torch.int32)[9, 6] ^= 1
    swapped = torch.cat([a[5:], a[:5]])
    others = [
        {"a": flipped, "b": b},
        {"a": swapped, "b": b},
        {"a": a.view(7, 10), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"c": a, "b": b},
        {"a": a},
    ]
    assert len({found, *map(hash_of, others)}) == len(others) + 1


def test_odd_shapes():
    assert hash_of({"a": torch.tensor(1.0)}) != hash_of({"a": torch.tensor(2.0)})
    assert hash_of({"a": torch.empty(0, 3)}) == hash_of({"a": torch.empty(3, 0)}) == 0


def row_of(degrees, spoiled):
    """The row of this rank for a split of a tiny model; rank ``spoiled`` reads another last row."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims(*degrees, world_size)
    model = split_model(
        on_meta("llama3"), dims, dims.build_mesh("cpu"), torch.device("cpu"), max_logits_bytes=1 << 20
    )
    tensors = dict(random_weights("llama3"))
    if rank == spoiled:
        for tensor in tensors.values():
            tensor[-1] = 0
    weights = WeightsHash()
    model.load(tensors, weights)
    rows = [None] * world_size
    dist.all_gather_object(rows, weights.row())
    return np.stack(rows)


# (dp_replicate, dp_shard, cp, tp)
SPLITS = [(2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 1)]


@run_ranks(4)
def test_shards_add_up_to_the_hash_of_the_whole(monkeypatch, world_size):
    monkeypatch.setattr(weights_hash, "BLOCK_BYTES", 64)
    hosts = dict.fromkeys(range(4), "a")
    names = [name for name, _ in on_meta("llama3").named_parameters()]
    tensors = random_weights("llama3")
    whole = f"{hash_of({name: tensors[name] for name in names}):032x}"
    for degrees in SPLITS:
        assert combine(row_of(degrees, None), hosts) == whole, degrees
        rows = row_of(degrees, 3)
        if degrees[0] > 1:
            with pytest.raises(ValueError, match=r"weights differ between ranks: .*rank 3\)"):
                combine(rows, hosts)
        else:
            assert combine(rows, hosts) != whole, degrees
