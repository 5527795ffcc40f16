"""Run the recipe in processes of its own, and read what it wrote."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from helpers.processes import Script, rank_variables

BIN = Path(sys.executable).parent
TUNE = str(BIN / "tune")
TORCHRUN = str(BIN / "torchrun")
PPL_EVAL = str(BIN / "ppl-eval")
MANY_RUNS = str(Path(__file__).with_name("many_runs.py"))


@dataclass
class Finished:
    """A command that ended: its exit code, stdout and stderr together, and the exit codes of its ranks."""

    code: int
    output: str
    codes: tuple[int, ...] = ()


def run(
    *command: str, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Finished(done.returncode, done.stdout)


def result_of(output_dir: Path) -> dict[str, Any]:
    """The result file of a run."""
    return json.loads((output_dir / "result.json").read_text())


def many(
    num_processes: int,
    argvs: list[list[str]],
    scratch: Path,
    env: dict[str, str] | None = None,
    nodes: Sequence[int] | None = None,
) -> Finished:
    """Run the recipe once for every argument list, all in the same ``num_processes`` ranks.

    Args:
        num_processes: ranks.
        argvs: argument lists of the recipe.
        scratch: a folder to write to.
        env: further variables.
        nodes: node that each rank believes to be on; None for one node.
    """
    jobs = scratch / f"jobs{num_processes}.json"
    jobs.write_text(json.dumps(argvs))
    envs = [dict(env or {}) for _ in range(num_processes)]
    for rank, node in enumerate(nodes or []):
        envs[rank] |= {"GROUP_RANK": str(node), "LOCAL_RANK": str(list(nodes[:rank]).count(node))}
    return ranks([[MANY_RUNS, str(jobs)]] * num_processes, scratch, envs)


def ranks(
    argvs: list[list[str]], scratch: Path, envs: list[dict[str, str]] | None = None, timeout: float = 300
) -> Finished:
    """Run one Python script a rank, with what torchrun gives them: its variables, a store, one thread each.

    Nothing ends the others when a rank ends. Tests of the launch itself start ``tune run`` or ``torchrun``.

    Args:
        argvs: script and arguments of every rank.
        scratch: a folder to write to.
        envs: further variables of every rank.
        timeout: seconds after which a rank that still runs fails the test.
    """
    with running_ranks(argvs, scratch, envs) as (running, _):
        return finish(running, timeout)


def finish(running: list[Script], timeout: float) -> Finished:
    """Wait for ranks to end by themselves."""
    deadline = time.monotonic() + timeout
    codes = tuple(script.wait(max(0.0, deadline - time.monotonic())) for script in running)
    return Finished(next(filter(None, codes), 0), running[0].output(), codes)


@contextmanager
def running_ranks(
    argvs: list[list[str]], scratch: Path, envs: list[dict[str, str]] | None = None
) -> Iterator[tuple[list[Script], dist.TCPStore]]:
    """Start one Python script a rank, as ``ranks`` does; those that still run at the end are killed.

    Yields:
        The ranks, and the store that they share.
    """
    with tempfile.NamedTemporaryFile(dir=scratch, suffix=".txt", delete=False) as file:
        output = Path(file.name)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **({"OMP_NUM_THREADS": "1"} if len(argvs) > 1 else {}),
    }
    running: list[Script] = []
    try:
        for rank, (argv, env) in enumerate(zip(argvs, envs or [{}] * len(argvs), strict=True)):
            place = rank_variables(rank, len(argvs))
            running.append(Script(argv, {**shared, **place, **env}, output))
        yield running, store
    finally:
        for script in running:
            script.kill()


def the_error(finished: Finished) -> str:
    """The only error that was printed, in the last line but for the warnings of torch's store."""
    (error,) = re.findall(r"^error: (.*)$", finished.output, re.MULTILINE)
    lines = [line for line in finished.output.splitlines() if not line.startswith("[W")]
    assert lines[-1] == f"error: {error}", finished.output
    return error
