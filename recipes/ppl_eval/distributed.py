"""Processes that belong together: who they are, agreeing before work, failing together, adding up.

Everything before and beside the process group goes over the rendezvous store: it works before any collective
does, names who is missing, and cannot deadlock. The only collectives of a run are the reductions at its end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

_ABORT = "abort"
# How often a waiting process looks at the store, and how long it waits before it says what for.
_POLL = timedelta(seconds=1)


class Stop(Exception):
    """Ends this process without another word: the reason was already printed, here or by another rank."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: number of this process.
        world_size: processes of the run.
        local_rank: number of this process on its node.
        local_world_size: processes of this node.
        node: number of this node, as the launcher counts.
        host: its name.
        store: key-value store that all of them share.
        timeout: how long a process waits for another.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    host: str
    store: dist.Store
    timeout: timedelta

    @property
    def num_nodes(self) -> int:
        """Nodes of the run, as the launcher counts them."""
        return int(os.environ.get("GROUP_WORLD_SIZE", "1"))

    @property
    def where(self) -> str:
        """This process, for messages."""
        return f"rank {self.rank} on {self.host}"

    def say(self, message: str) -> None:
        """One line on rank 0."""
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)

    def agree(
        self, phase: str, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> T:
        """Do something on every rank, and go on only if all of them could and all came to the same facts.

        What goes wrong is printed once, by rank 0, however many ranks it hits.

        Args:
            phase: name of the step; used once a run.
            work: the step. A ValueError or OSError it raises is for the person; any other exception passes
                through.
            facts: what must be equal on all ranks, by name; JSON values.

        Returns:
            What ``work`` returned.

        Raises:
            Stop: if a rank failed, is missing, or differs.
        """
        value = None
        report: dict[str, Any] = {"host": self.host, "error": None, "facts": {}}
        try:
            value = work()
            report["facts"] = {key: json.dumps(fact, sort_keys=True) for key, fact in facts(value).items()}
        except (ValueError, OSError) as error:
            report["error"] = str(error)
        self.store.set(f"{phase}/report/{self.rank}", json.dumps(report))
        if self.rank == 0:
            problem = _find_problem(self._gather_reports(phase))
            if problem:
                print(f"\nerror: {problem}", file=sys.stderr, flush=True)
            # Only now may the others go: the launcher ends rank 0 as soon as one of them does.
            self.store.set(f"{phase}/verdict", "stop" if problem else "go")
        self._wait([f"{phase}/verdict"], f"the verdict of rank 0 on {phase!r}")
        if self.store.get(f"{phase}/verdict") != b"go":
            raise Stop(EXIT_BAD_INPUT)
        return value  # type: ignore[return-value]

    def once_per_node(self, name: str, work: Callable[[], str]) -> str:
        """Let one process of each node do something, and tell its neighbours what came of it.

        Args:
            name: name of the step; used once a run.
            work: the step, which returns text (a path, for example).

        Returns:
            What ``work`` returned on this node.

        Raises:
            ValueError: with the message of the one that ``work`` raised, on every rank of the node.
        """
        key = f"{name}/node/{self.node}"
        if self.local_rank == 0:
            try:
                answer = {"value": work()}
            except (ValueError, OSError) as error:
                answer = {"error": str(error)}
            self.store.set(key, json.dumps(answer))
        else:
            self._wait([key], f"local rank 0 of {self.host} to finish {name!r}")
            answer = json.loads(self.store.get(key))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def announce_failure(self, message: str) -> bool:
        """Tell all ranks that the run has failed.

        Returns:
            Whether this rank was the first to say so, and should print why: errors that follow from another
            rank's are noise.
        """
        mine = json.dumps({"where": self.where, "host": self.host, "message": message})
        try:
            return json.loads(self.store.compare_set(_ABORT, "", mine))["where"] == self.where
        except (dist.DistError, RuntimeError):
            return True  # The store is gone: nobody else may be left to say it.

    def _gather_reports(self, phase: str) -> list[dict[str, Any] | None]:
        keys = [f"{phase}/report/{rank}" for rank in range(self.world_size)]
        first_contact = phase == FIRST_PHASE
        self._wait(keys, f"all ranks to finish {phase!r}", give_up=first_contact)
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def _wait(self, keys: list[str], what: str, give_up: bool = False) -> None:
        # Work before the reports may rightly take long (a big model from a slow disk), so only the first
        # contact gives up. A rank that fails ends this wait through the launcher or the abort watch.
        waited = timedelta()
        for key in keys:
            while not self.store.check([key]):
                try:
                    self.store.wait([key], _POLL)
                except (dist.DistStoreError, RuntimeError):
                    waited += _POLL
                    if give_up and waited >= self.timeout:
                        return
                    if waited.seconds % max(1, int(self.timeout.total_seconds())) == 0:
                        print(
                            f"{self.where}: still waiting for {what}, {waited.seconds} s so far",
                            file=sys.stderr,
                            flush=True,
                        )


FIRST_PHASE = "settings"


def connect(timeout_seconds: float) -> World:
    """Find the other processes of the run, from the variables that torchrun sets; without them, a run of one
    process."""
    timeout = timedelta(seconds=timeout_seconds)
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    local_rank = int(env.get("LOCAL_RANK", "0"))
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
        node=env.get("GROUP_RANK", socket.gethostname()),
        host=socket.gethostname(),
        store=store,
        timeout=timeout,
    )


def _find_problem(reports: list[dict[str, Any] | None]) -> str | None:
    """What the ranks' reports say is wrong: missing ranks, errors, differing facts; None if nothing."""
    missing = [rank for rank, report in enumerate(reports) if report is None]
    came = {rank: report for rank, report in enumerate(reports) if report is not None}
    if missing:
        there = _by_host({rank: report["host"] for rank, report in came.items()})
        return f"rank {_ranges(missing)} did not come within timeout_seconds; there are {there}"
    errors = {rank: report["error"] for rank, report in came.items() if report["error"]}
    if errors:
        if len(set(errors.values())) == 1 and len(errors) == len(reports):
            return errors[0]
        return "\n".join(
            f"rank {_ranges(ranks)} on {came[ranks[0]]['host']}: {message}"
            for message, ranks in _group(errors).items()
        )
    lines = []
    for fact in sorted({name for report in came.values() for name in report["facts"]}):
        values = {rank: report["facts"].get(fact, "nothing") for rank, report in came.items()}
        groups = _group(values)
        if len(groups) > 1:
            told = "; ".join(
                f"{value} on {_by_host({rank: came[rank]['host'] for rank in ranks})}"
                for value, ranks in groups.items()
            )
            lines.append(f"{fact} differs between ranks: {told}")
    return "\n".join(lines) or None


def _group(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def _by_host(hosts: Mapping[int, str]) -> str:
    return ", ".join(f"{host} (rank {_ranges(ranks)})" for host, ranks in _group(hosts).items())


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def environment_facts(world: World, config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks before anything else is worth trying."""
    return {
        "torch version": torch.__version__,
        "world size": world.world_size,
        **{f"config key {name}": value for name, value in config.items()},
    }


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """While inside, a failure of any rank ends all of them within seconds, and its cause is printed once.

    Raises:
        Stop: in the place of a ValueError or OSError, which is printed as it was written for the person, and
            of errors that only follow from another rank's. Any other exception passes through, for its
            traceback.
    """
    with _watch_for_abort(world):
        try:
            yield
        except Stop:
            raise
        except BaseException as error:
            first = world.announce_failure(f"{type(error).__name__}: {error}")
            for_person = isinstance(error, ValueError | OSError | KeyboardInterrupt)
            if first and for_person:
                print(f"\nerror: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
            if for_person or not first:
                raise Stop(EXIT_BAD_INPUT if first else EXIT_FAILED) from error
            raise


@contextmanager
def _watch_for_abort(world: World) -> Iterator[None]:
    # The launcher ends the ranks of one node together, but not those of others, which would wait in a
    # collective until it times out.
    if world.world_size == 1:
        yield
        return
    done = threading.Event()
    store = world.store.clone()  # type: ignore[attr-defined]

    def watch() -> None:
        while not done.wait(_POLL.total_seconds()):
            try:
                if not store.check([_ABORT]):
                    continue
                reason = json.loads(store.get(_ABORT))
            except (dist.DistError, RuntimeError) as error:
                reason = {"host": None, "where": "the rendezvous store", "message": str(error)}
            if done.is_set() or reason["where"] == world.where:
                return
            if reason["host"] != world.host and world.local_rank == 0:
                print(
                    f"{world.where} stops: {reason['where']} failed: {reason['message']}",
                    file=sys.stderr,
                    flush=True,
                )
            # A collective or a kernel cannot be interrupted in any other way.
            os._exit(EXIT_FAILED)

    thread = threading.Thread(target=watch, name="abort-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def process_group(world: World, device: torch.device, backend: str | None) -> Iterator[None]:
    """Form the default process group and destroy it on every way out.

    Args:
        world: the processes.
        device: this rank's device.
        backend: as configured; None takes nccl for cuda and gloo for cpu.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"),
        store=dist.PrefixStore("process_group", world.store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=world.timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_reduce_sum(
    values: npt.NDArray[Any], device: torch.device, group: dist.ProcessGroup | None = None
) -> npt.NDArray[Any]:
    """Sum a vector over ranks, in its own dtype.

    Args:
        values: int64, float64 or float32 [N].
        device: where the backend wants tensors.
        group: None is all ranks.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor.cpu().numpy()


def all_gather_rows(
    row: npt.NDArray[np.float64], world_size: int, device: torch.device
) -> npt.NDArray[np.float64]:
    """One row of float64 from every rank; [world_size, N]."""
    mine = torch.from_numpy(row).to(device)
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu().numpy()
