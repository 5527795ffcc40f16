"""Run evaluations, several at once, each as ``ppl-eval launch`` in processes of its own.

What is finished is not run again, what is not goes on from its ledger, and one that fails stops no other.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from ppl_eval.config.files import read_json_object, whole_file
from ppl_eval.distributed.parent import end_with_parent

CONFIG, LOG = "config.yaml", "log.txt"
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
_POLL_SECONDS = 0.2
# Ranks of a sweep that was killed end a moment after it.
_LAST_RANK_SECONDS = 30.0


@dataclass
class Job:
    """One evaluation.

    Attributes:
        name: shown to the person.
        config: the whole config.
        folder: its output_dir.
        state: ``waiting``, ``running``, ``done`` or ``failed``.
        again: whether it was done before and is not run again.
        message: of a failed one, its last line.
    """

    name: str
    config: DictConfig
    folder: Path
    state: str = WAITING
    again: bool = False
    message: str = ""

    def result(self) -> dict[str, Any]:
        """Return what its result file says."""
        return read_json_object(self.folder / "result.json")


def prepare(job: Job) -> None:
    """Write the config of a job into its folder, and see whether it is done.

    A folder whose config was another one, apart from its tags, is kept under another name.
    """
    path = job.folder / CONFIG
    if path.is_file() and _without_tags(OmegaConf.load(path)) != _without_tags(job.config):
        kept = next(
            folder
            for number in range(1, 10**6)
            if not (folder := job.folder.with_name(f"{job.folder.name}.old-{number}")).exists()
        )
        job.folder.rename(kept)
        print(f"{job.name}: its config changed; what the old one gave is kept in {kept}", flush=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(OmegaConf.to_yaml(job.config))
    if (job.folder / "result.json").is_file():
        job.state, job.again = DONE, True


def look(jobs: Sequence[Job]) -> None:
    """See which jobs are done, and touch nothing."""
    for job in jobs:
        path = job.folder / CONFIG
        if path.is_file() and (job.folder / "result.json").is_file():
            same = _without_tags(OmegaConf.load(path)) == _without_tags(job.config)
            job.state = DONE if same else WAITING


def _without_tags(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "tags"}


def run_jobs(jobs: Sequence[Job], slots: int, nproc_per_node: int, show: Callable[[Job], None]) -> None:
    """Run those jobs that are waiting.

    Args:
        jobs: in the order in which they are started.
        slots: how many at once.
        nproc_per_node: processes of each.
        show: told of every change, and now and then of a running one.
    """
    waiting = [job for job in jobs if job.state == WAITING]
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            for slot in range(slots):
                if slot not in running and waiting:
                    job = waiting.pop(0)
                    running[slot] = (
                        job,
                        _start(job, _environment(slot, slots, nproc_per_node), nproc_per_node),
                    )
                    show(job)
            time.sleep(_POLL_SECONDS)
            for slot, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    _end(job, process.returncode)
                show(job)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def _start(job: Job, environment: dict[str, str], nproc_per_node: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "ppl_eval.commands.cli", "launch"]
    command += ["--nproc_per_node", str(nproc_per_node), "--", "--config", str(job.folder / CONFIG)]
    _wait_for_last(job.folder)
    job.state = RUNNING
    # Behind what an earlier start wrote.
    with open(job.folder / LOG, "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
            # A terminal's Ctrl-C comes to the sweep alone.
            process_group=0,
            preexec_fn=end_with_parent,
        )


def _end(job: Job, code: int) -> None:
    done = (job.folder / "result.json").is_file()
    job.state = DONE if done and code == 0 else FAILED
    if job.state == FAILED:
        job.message = f"exit code {code}: {_last_line(job.folder / LOG)}"


def _last_line(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def _environment(slot: int, slots: int, nproc_per_node: int) -> dict[str, str]:
    """Return what divides the machine: devices, and on a CPU the cores."""
    devices = visible_devices()
    if devices:
        first = slot * nproc_per_node
        chosen = [devices[(first + place) % len(devices)] for place in range(nproc_per_node)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // (slots * nproc_per_node)))}


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Keep other sweeps and watches out of a folder.

    Raises:
        ValueError: if one is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another sweep or watch is writing to {folder}") from error
    try:
        yield
    finally:
        lock.release()


def _wait_for_last(folder: Path) -> None:
    """Wait until the ranks of a killed sweep have left a run's folder."""
    if not (folder / ".lock").exists():
        return
    lock = FileLock(folder / ".lock")
    try:
        with lock.acquire(timeout=_LAST_RANK_SECONDS):
            pass
    except Timeout:
        return  # The run itself says who is there.
