"""Who scores which batches: each is scored once, in step where a copy of the model has several ranks, and
most by those who are fast."""

import importlib.util
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from helpers.runs import many, ranks, result_of
from helpers.tiny import write_config
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics.window_records import record_dtype
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.protocols.sampler import DUMMY_BATCH
from ppl_eval.run.schedule import Schedule, in_use

UNEVEN_RANKS = str(Path(__file__).parents[1] / "helpers" / "uneven_ranks.py")


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "schedule.py"
    spec = importlib.util.spec_from_file_location("schedule_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state_of(rank, dims, num_batches, schedule="dynamic", done=(), store=None):
    """As much of a run as a schedule looks at."""
    done_of = np.isin(np.arange(num_batches), done)
    world = World(
        *(rank, dims.world_size, rank, "0", "here", store, timedelta(seconds=60), "start"),
        nodes=(),
        common=store,
    )
    share = SimpleNamespace(batches=range(num_batches))
    settings = SimpleNamespace(schedule=schedule)
    return SimpleNamespace(
        settings=settings, world=world, dims=dims, share=share, done=done_of, num_done=int(done_of.sum())
    )


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1, 1), (3, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (2, 3, 2, 1), (2, 1, 1, 2)]
)
@pytest.mark.parametrize("done", [(), (0, 5, 6, 22)])
def test_ranks_of_a_copy_go_in_step_and_every_batch_is_scored_once(degrees, done):
    dims = ParallelDims(*degrees, world_size=int(np.prod(degrees)))
    store = dist.HashStore()

    def walk(rank):
        schedule = Schedule(state_of(rank, dims, 23, done=done, store=store))
        return list(schedule), schedule

    with ThreadPoolExecutor(dims.world_size) as pool:
        walked = list(pool.map(walk, range(dims.world_size)))
    counted = Counter(
        batch
        for rank, (batches, _) in enumerate(walked)
        if dims.is_counted(rank)
        for batch in batches
        if batch != DUMMY_BATCH
    )
    assert counted == dict.fromkeys(sorted(set(range(23)) - set(done)), 1)
    of_copy = dims.dp_shard * dims.peers
    for copy in range(dims.dp_replicate):
        own = [batches for batches, _ in walked[copy * of_copy : (copy + 1) * of_copy]]
        assert len({len(batches) for batches in own}) == 1, "a rank makes another number of forwards"
        for first in range(0, of_copy, dims.peers):
            assert all(batches == own[first] for batches in own[first : first + dims.peers])
    assert all(DUMMY_BATCH not in batches[:-1] for batches, _ in walked)
    if dims.dp_replicate == 1:
        assert {schedule.share for _, schedule in walked} == {1 / dims.dp_degree}


def test_auto_is_dynamic_where_there_is_something_to_balance():
    def chosen(degrees, num_batches, asked="auto"):
        return in_use(state_of(0, ParallelDims(*degrees, int(np.prod(degrees))), num_batches, asked))

    assert chosen((1, 1, 1, 1), 100) == "static"
    assert chosen((1, 4, 1, 1), 100) == "static", "one copy of the model"
    assert chosen((1, 1, 2, 2), 100) == "static"
    assert chosen((2, 1, 1, 1), 3) == "dynamic"
    assert chosen((2, 1, 1, 1), 2) == "static", "a batch each"
    assert chosen((2, 2, 1, 1), 4) == "static", "a step each"
    assert chosen((2, 2, 1, 1), 5) == "dynamic"
    assert chosen((2, 1, 1, 1), 100, "static") == "static"
    assert chosen((1, 1, 1, 1), 1, "dynamic") == "dynamic"


def test_on_virtual_time_1024_ranks_lose_little_to_slow_ones(benchmark):
    batches = 1024 * 100
    even = benchmark.simulate(batches, [1.0] * 1024)
    uneven = [2.0] * 10 + [1.0] * 1014
    assert even.dynamic < 1.01
    assert benchmark.simulate(batches, uneven).dynamic < 1.03
    assert benchmark.simulate(batches, uneven).static > 1.9
    assert benchmark.simulate(100, [1.0, 4.0]).dynamic < 1.15
    assert benchmark.simulate(100, [1.0, 4.0]).static == pytest.approx(2.5)
    assert even.messages < 40 * 1024


def test_what_a_stalled_rank_does_not_take_others_score(tiny, tmp_path, private_home):
    """Rank 1 holds its first batch until rank 0 has recorded the other 18; static would not end."""
    argv = ["--config", str(write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)), "max_windows=38"]
    finished = many(1, [[*argv, "schedule=dynamic", f"output_dir={tmp_path / 'alone'}"]], tmp_path)
    assert finished.code == 0, finished.output
    size = 36 * record_dtype().itemsize
    env = {"WAIT_FOR": "rank-0.bin", "WAIT_BYTES": str(size), "OMP_NUM_THREADS": "1"}
    argv += ["per_window=true", f"output_dir={tmp_path / 'two'}"]
    finished = ranks([[UNEVEN_RANKS, *argv]] * 2, tmp_path, [env] * 2)
    assert finished.code == 0, finished.output
    alone, two = result_of(tmp_path / "alone"), result_of(tmp_path / "two")
    assert two["nll_sum_hex"] == alone["nll_sum_hex"]
    assert two["coverage"] == alone["coverage"]
    assert alone["parallel"]["schedule"] == two["parallel"]["schedule"] == "dynamic"
    tokens = two["timing"]["per_rank"]["num_tokens"]
    assert tokens["min"] * 18 == tokens["max"]
