"""What a person sees of many runs: one table on a terminal, a line for every change elsewhere."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ppl_eval.experiments.slots import DONE, FAILED, RUNNING, WAITING, Job

_REFRESH_SECONDS = 1.0
_MOST_ROWS = 30
# What a person looks for first.
_ORDER = {RUNNING: 0, FAILED: 1, DONE: 2, WAITING: 3}


@contextmanager
def shown(jobs: Sequence[Job]) -> Iterator[Callable[[Job], None]]:
    """Show jobs while they run.

    Yields:
        What is to be told of changes.
    """
    if not sys.stdout.isatty():
        states: dict[str, str] = {}

        def line(job: Job) -> None:
            if states.get(job.name) != job.state:
                states[job.name] = job.state
                print(f"{job.name}: {job.state}{_figure(job)}", flush=True)

        yield line
        return
    with Live(_table(jobs), console=Console(), auto_refresh=False) as live:
        drawn = 0.0

        def draw(_: Job) -> None:
            nonlocal drawn
            if time.monotonic() - drawn >= _REFRESH_SECONDS:
                drawn = time.monotonic()
                live.update(_table(jobs), refresh=True)

        yield draw
        live.update(_table(jobs), refresh=True)


def _figure(job: Job) -> str:
    if job.state == DONE:
        result = job.result()
        return f", perplexity {result['perplexity']} over {result['num_tokens']:,} tokens"
    return f", {job.message}" if job.message else ""


def _table(jobs: Sequence[Job]) -> Table:
    counts = Counter(job.state for job in jobs)
    table = Table(title=", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state]))
    for name in ("run", "state", ""):
        table.add_column(name)
    for job in sorted(jobs, key=lambda job: _ORDER[job.state])[:_MOST_ROWS]:
        table.add_row(job.name, job.state, _figure(job).removeprefix(", "))
    if len(jobs) > _MOST_ROWS:
        table.add_row(f"... {len(jobs) - _MOST_ROWS} more", "", "")
    return table
