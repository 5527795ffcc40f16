"""Measures the constants of docs/scaling.md and prints its tables: `python benchmarks/scaling.py`.

Takes some minutes on two cores. `--processes 2,4,8` sets the sizes of the gloo groups that are measured.
"""

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.processes import on_ranks
from ppl_eval.distributed.agreement import Node
from ppl_eval.distributed.collectives import add_over_ranks
from ppl_eval.distributed.heartbeat import Heartbeats
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics.window_records import record_dtype
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.protocols import disjoint
from ppl_eval.protocols.plan import Plan, make_plan
from ppl_eval.protocols.sampler import DUMMY_BATCH, batches_of
from ppl_eval.results.ledger import Ledger, read_ledger

# int64 numbers: those of a run over 25 domains; without domains it adds 321.
VECTOR_SIZE = 8192
# Steps of a run that end in `World.agree`.
AGREEMENTS = 8
WORLD_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Constants:
    """What the model of docs/scaling.md is made of; seconds.

    Attributes:
        per_step: of one step of a reduction (a recursive doubling has log2 N of them).
        per_report: rank 0's time for one rank's report in an agreement.
    """

    per_step: float
    per_report: float


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        num_tokens: tokens to score.
        tokens_per_second: of one rank.
        tokens_per_batch: of one batch.
        load_seconds: reading the model; the same on every rank.
        jitter: relative spread (standard deviation) of batch times.
    """

    num_tokens: float
    tokens_per_second: float
    tokens_per_batch: float
    load_seconds: float
    jitter: float


def predict(constants: Constants, job: Job, world_size: int) -> dict[str, float]:
    """Seconds of each part of a run: compute / N + reduce(N) + load + straggler.

    The straggler is the last batch, which some ranks have and others don't, and the slowest of N ranks: with
    n batches each, their times spread by jitter / sqrt(n) of the compute time, and the largest of N normal
    numbers lies about sqrt(2 ln N) deviations out.
    """
    compute = job.num_tokens / job.tokens_per_second / world_size
    batch = job.tokens_per_batch / job.tokens_per_second
    batches = max(1.0, compute / batch)
    spread = compute * job.jitter / math.sqrt(batches) * math.sqrt(2 * math.log(world_size))
    reduce = constants.per_step * math.log2(world_size) + AGREEMENTS * constants.per_report * world_size
    return {"compute": compute, "reduce": reduce, "load": job.load_seconds, "straggler": batch + spread}


def reduction_seconds() -> dict[str, float]:
    """Median time of one sum over ranks, flat and by node of two ranks; on every rank of a group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes = [list(range(first, min(first + 2, world_size))) for first in range(0, world_size, 2)]
    vector = np.arange(VECTOR_SIZE, dtype=np.int64) + rank
    found = {}
    for topology in ("flat", "hierarchical"):
        add = add_over_ranks(nodes, rank, torch.device("cpu"), topology)
        times = []
        for _ in range(30):
            dist.barrier()
            begin = time.perf_counter()
            add(vector)
            times.append(time.perf_counter() - begin)
        found[topology] = float(np.median(times))
    return found


def agreement_seconds(world_size: int) -> float:
    """Rank 0's time in one agreement of so many ranks, whose reports are all there."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    world = World(0, world_size, 0, 8, "0", "here", dist.PrefixStore("run", store), timedelta(seconds=60))
    report = json.dumps({"host": "here", "node": "0", "error": None, "facts": {}})
    for rank in range(1, world_size):
        world.store.set(f"phase/report/{rank}", report)
    begin = time.perf_counter()
    world.agree("phase", lambda: None)
    return time.perf_counter() - begin


def beat_seconds(num_nodes: int) -> float:
    """Time of one heartbeat of one leader among so many nodes."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    nodes = [Node(str(i), f"host{i}", list(range(8 * i, 8 * i + 8))) for i in range(num_nodes)]
    heartbeats = Heartbeats(store, nodes, "0", True)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        heartbeats.beat()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def big_plan() -> Plan:
    """About 10^9 tokens in a million documents: 976,000 windows."""
    length_D = np.random.default_rng(0).integers(500, 1500, size=1_000_000)
    return make_plan(disjoint(max_seq_len=512, join=None), np.concatenate([[0], np.cumsum(length_D)]), 4)


def plan_on(world_size: int, plan: Plan) -> dict[str, float]:
    """Rank 0's share of a plan in a fake process group of so many ranks: time and memory of its own, and
    whether all ranks' shares are the plan."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        dims = ParallelDims(-1, min(8, world_size), 1, 1, world_size)
        tracemalloc.start()
        begin = time.perf_counter()
        mesh = dims.build_mesh("cpu")
        assert mesh is not None
        assert mesh.size() == world_size
        own = batches_of(dims.dp_rank(0), dims.dp_degree, range(plan.num_batches), equal_steps=True)
        for batch in own:
            if batch != DUMMY_BATCH:
                plan.locate(plan.batch_ids(batch))
        seconds = time.perf_counter() - begin
        kib = tracemalloc.get_traced_memory()[1] / 1024
        tracemalloc.stop()
    finally:
        dist.destroy_process_group()
    scored = np.zeros(plan.num_batches, dtype=np.int8)
    for rank in range(world_size):
        share = batches_of(dims.dp_rank(rank), dims.dp_degree, range(plan.num_batches), equal_steps=True)
        batches = np.array(share, dtype=np.int64)
        scored[batches[batches != DUMMY_BATCH]] += 1
    assert (scored == 1).all(), "a batch is scored by no rank, or by more than one"
    return {"steps": len(own), "seconds": seconds, "peak_kib": kib}


def ledger_growth(num_batches: int, windows_per_batch: int = 4) -> dict[str, float]:
    """What a ledger costs: time of a batch, of a synchronisation, memory that stays, bytes on disk."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), 0)
        records = np.zeros(windows_per_batch, dtype=record_dtype())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        for _ in range(num_batches):
            ledger.append(records)
        seconds = time.perf_counter() - begin
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        begin = time.perf_counter()
        ledger.close()
        sync = time.perf_counter() - begin
        size = os.path.getsize(ledger.path)
        assert len(read_ledger(Path(folder))) <= num_batches * windows_per_batch
        return {
            "microseconds": seconds / num_batches * 1e6,
            "sync_milliseconds": sync * 1e3,
            "grown_kib": grown,
            "mib": size / 2**20,
        }


def main() -> None:
    """Measure and print, part by part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,4,8")
    sizes = [int(size) for size in parser.parse_args().processes.split(",")]

    print("one sum over ranks, milliseconds (median of 30; slowest rank)")
    steps = []
    for size in sizes:
        found = on_ranks(reduction_seconds, size)
        slowest = {topology: max(rank[topology] for rank in found) for topology in found[0]}
        steps.append(slowest["flat"] / math.log2(size))
        print(f"  {size:5} processes  " + "  ".join(f"{name} {t * 1e3:.2f}" for name, t in slowest.items()))

    print("one agreement, milliseconds of rank 0; one heartbeat of one leader with so many nodes of 8")
    agreements = {size: agreement_seconds(size) for size in WORLD_SIZES}
    for size, seconds in agreements.items():
        print(
            f"  {size:5} ranks  agreement {seconds * 1e3:.1f}  heartbeat {beat_seconds(size // 8) * 1e3:.2f}"
        )

    plan = big_plan()
    print(f"plan of {plan.num_windows:,} windows in {plan.num_batches:,} batches, in a fake process group")
    for size in (8, 64, 1024):
        found_here = plan_on(size, plan)
        print(f"  {size:5} ranks  " + "  ".join(f"{name} {value:,.1f}" for name, value in found_here.items()))

    print("ledger of one rank, batches of 4 windows")
    for num_batches in (1_000, 100_000):
        grown = ledger_growth(num_batches)
        print(
            f"  {num_batches:7} batches  "
            + "  ".join(f"{name} {value:,.1f}" for name, value in grown.items())
        )

    constants = Constants(max(steps), max(seconds / size for size, seconds in agreements.items()))
    print(f"constants: {constants}")
    job = Job(num_tokens=1e9, tokens_per_second=5e3, tokens_per_batch=8192, load_seconds=60, jitter=0.05)
    print(f"seconds of {job}")
    for size in WORLD_SIZES:
        parts = predict(constants, job, size)
        whole = sum(parts.values())
        shown = "  ".join(f"{name} {seconds:,.2f}" for name, seconds in parts.items())
        print(f"  {size:5} ranks  {shown}  sum {whole:,.0f}  reduce {parts['reduce'] / whole:.3%}")


if __name__ == "__main__":
    main()
