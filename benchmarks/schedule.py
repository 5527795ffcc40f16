"""Measures what a slow rank costs under each schedule, and prints the tables of docs/scaling.md:
`python benchmarks/schedule.py`.

Two real ranks on a tiny model, one of which scores every batch four times, in turns with equal ranks; then
the same rule for a thousand ranks on virtual time. Takes two minutes on two idle cores.
"""

import argparse
import heapq
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers import tiny
from helpers.runs import ranks, result_of
from ppl_eval.protocols.sampler import chunk_bounds

UNEVEN_RANKS = str(Path(__file__).parent.parent / "tests" / "helpers" / "uneven_ranks.py")
SLOWER = 4


class Simulated(NamedTuple):
    """What a run would take.

    Attributes:
        static: time under the static schedule, over the ideal.
        dynamic: the same under the dynamic one.
        messages: how many messages the store gets under it.
    """

    static: float
    dynamic: float
    messages: int


def simulate(
    num_batches: int, seconds_per_batch: Sequence[float], message_seconds: float = 1e-3
) -> Simulated:
    """Run both schedules on virtual time.

    Args:
        num_batches: of the run.
        seconds_per_batch: of each rank.
        message_seconds: what it takes to get a chunk.
    """
    num_ranks = len(seconds_per_batch)
    ideal = num_batches / sum(1 / seconds for seconds in seconds_per_batch)
    static = max(
        -(-(num_batches - rank) // num_ranks) * seconds for rank, seconds in enumerate(seconds_per_batch)
    )
    free_at = [(0.0, rank) for rank in range(num_ranks)]
    end = 0.0
    bounds = chunk_bounds(num_batches, num_ranks)
    for first, last in pairwise(bounds):
        now, rank = heapq.heappop(free_at)
        now += message_seconds + (last - first) * seconds_per_batch[rank]
        end = max(end, now)
        heapq.heappush(free_at, (now, rank))
    return Simulated(static / ideal, end / ideal, len(bounds) - 1 + num_ranks)


def score_seconds(argv: list[str], folder: Path, slower: int) -> float:
    """Seconds that two ranks take to score, of which the second is so many times slower."""
    env = {"SLOWER": str(slower), "OMP_NUM_THREADS": "1", "PPL_EVAL_HOME": str(folder / "home")}
    finished = ranks([[UNEVEN_RANKS, *argv, f"output_dir={folder / 'out'}"]] * 2, folder, [env] * 2)
    assert finished.code == 0, finished.output
    return result_of(folder / "out")["timing"]["score_seconds"]


def measure(folder: Path, repeats: int, windows: int) -> None:
    """Time both schedules with equal ranks and with a slow one, in turns."""
    tiny.write_model(folder, num_layers=6, embed_dim=256, intermediate_dim=1024)
    tiny.write_tokenizer(folder)
    text = folder / "text.txt"
    text.write_text(tiny.TEXT * 40, encoding="utf-8")
    sizes = {"num_layers": 6, "embed_dim": 256, "intermediate_dim": 1024}
    config = tiny.write_config(folder / "config.yaml", folder, text, model={**tiny.MODEL, **sizes})
    argv = ["--config", str(config), "protocol.max_seq_len=256", f"max_windows={windows}", "batch_size=1"]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for schedule in ("static", "dynamic"):
            for slower in (1, SLOWER):
                found = score_seconds([*argv, f"schedule={schedule}"], folder, slower)
                seconds.setdefault((schedule, slower), []).append(found)
    middle = {case: statistics.median(values) for case, values in seconds.items()}
    even = middle["static", 1]
    ideal = 2 * even / (1 + 1 / SLOWER)
    print(f"two ranks, {windows} batches, medians of {repeats} in turns")
    print(f"  equal ranks: static {even:.2f} s, dynamic {middle['dynamic', 1]:.2f} s")
    print(f"  one {SLOWER} times slower, ideal {ideal:.2f} s:")
    for schedule in ("static", "dynamic"):
        taken = middle[schedule, SLOWER]
        print(f"    {schedule} {taken:.2f} s, {taken / ideal:.2f} of the ideal")


def message_microseconds(count: int = 5000) -> float:
    """Time of one message to the store on this host."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60))
    begin = time.perf_counter()
    for _ in range(count):
        client.add("chunks", 1)
    return (time.perf_counter() - begin) / count * 1e6


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--windows", type=int, default=200)
    given = parser.parse_args()
    print(f"one message to the store: {message_microseconds():.0f} microseconds")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), given.repeats, given.windows)
    print("on virtual time, batches of 1 s, 1 ms a message; times over the ideal")
    cases = {
        "2 ranks, one at a quarter of the speed": (200, [1.0, 4.0]),
        "1,024 equal ranks": (102_400, [1.0] * 1024),
        "1,024 ranks, 1 % at half the speed": (102_400, [2.0] * 10 + [1.0] * 1014),
        "the same, 20 batches a rank": (20_480, [2.0] * 10 + [1.0] * 1014),
        "1,024 ranks, 1 % at an eighth of the speed": (102_400, [8.0] * 10 + [1.0] * 1014),
    }
    for name, (num_batches, speeds) in cases.items():
        found = simulate(num_batches, speeds)
        print(
            f"  {name}: static {found.static:.3f}, dynamic {found.dynamic:.3f}, {found.messages:,} messages"
        )


if __name__ == "__main__":
    main()
