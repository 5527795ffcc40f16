"""Processes that belong together: who they are, and agreeing before work.

Everything before and beside the process group goes over the rendezvous store: it works before any collective
does, names who is missing, and cannot deadlock.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ppl_eval.distributed.agreement import Node, find_problem, group_by_node

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

FIRST_PHASE = "settings"
ABORT = "abort"
_NODES = "nodes"
POLL = timedelta(seconds=1)
_FAILED_PATIENCE_SECONDS = 5.0
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


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
        node: number of this node, as the launcher counts.
        host: its name.
        store: key-value store that all of them share.
        timeout: how long a process waits for another.
        nodes: the nodes of the run, by their first rank; empty until the ranks agreed on ``FIRST_PHASE``.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    host: str
    store: dist.Store
    timeout: timedelta
    nodes: list[Node] = field(default_factory=list)

    @property
    def where(self) -> str:
        """This process, for messages."""
        return f"rank {self.rank} on {self.host}"

    def agree(
        self, phase: str, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> T:
        """Do something on every rank, and go on only if all of them could and all came to the same facts.

        What goes wrong is printed once, by rank 0, however many ranks it hits. Ranks that wait for this one
        inside the step would never come to hear of it: so a rank that failed gives the others some seconds to
        come, and then fails by itself.

        Args:
            phase: name of the step; used once a run.
            work: the step. A ValueError or OSError it raises is for the person; any other exception passes
                through.
            facts: what must be equal on all ranks, by name; JSON values.

        Returns:
            What ``work`` returned.

        Raises:
            Stop: if a rank failed, is missing, or differs.
            ValueError: if this rank failed, and others did not come.
        """
        value = None
        report: dict[str, Any] = {
            "host": self.host,
            "node": self.node,
            "error": None,
            "facts": {},
        }
        try:
            value = work()
            report["facts"] = {key: json.dumps(fact, sort_keys=True) for key, fact in facts(value).items()}
        except (ValueError, OSError) as error:
            report["error"] = _told(error)
        self.store.set(f"{phase}/report/{self.rank}", json.dumps(report))
        if report["error"] and phase != FIRST_PHASE:
            awaited = self._reports(phase) if self.rank == 0 else [f"{phase}/verdict"]
            if not self._come(awaited, _FAILED_PATIENCE_SECONDS):
                raise ValueError(f"{self.where}: {report['error']}")
        if self.rank == 0:
            reports = self._gather_reports(phase)
            problem = find_problem(reports)
            if problem:
                print(f"\nerror: {problem}", file=sys.stderr, flush=True)
            elif phase == FIRST_PHASE:
                self.store.set(_NODES, json.dumps(group_by_node(reports)))
            # Only now may the others go: the launcher ends rank 0 as soon as one of them does.
            self.store.set(f"{phase}/verdict", "stop" if problem else "go")
        verdict = f"{phase}/verdict"
        while not self._wait([verdict], f"the verdict of rank 0 on {phase!r}", give_up=phase == FIRST_PHASE):
            # Rank 0 waits as long for the slowest, and starts to wait when it comes.
            if not self.store.check([f"{phase}/report/0"]):
                raise ValueError(f"rank 0 did not come within timeout_seconds; {self.where} waited for it")
        if self.store.get(f"{phase}/verdict") != b"go":
            raise Stop(EXIT_BAD_INPUT)
        if phase == FIRST_PHASE:
            self.nodes[:] = [Node(*node) for node in json.loads(self.store.get(_NODES))]
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
                answer = {"error": _told(error)}
            self.store.set(key, json.dumps(answer))
        else:
            self._wait([key], f"local rank 0 of {self.host} to finish {name!r}")
            answer = json.loads(self.store.get(key))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def check_world_size(self) -> None:
        """See that the ranks were told the same number of ranks, before they wait for that many.

        Raises:
            ValueError: if this one was told another number than the one that came first.
        """
        mine = {"where": self.where, "world_size": self.world_size}
        first = json.loads(self.store.compare_set("world_size", "", json.dumps(mine)))
        if first["world_size"] != self.world_size:
            raise ValueError(
                f"world size differs between ranks: {first['world_size']} on {first['where']};"
                f" {self.world_size} on {self.where} (WORLD_SIZE, which the launcher sets)"
            )

    def part(self) -> None:
        """After a run that went well: where rank 0 keeps the store, it stays until nobody needs it."""
        if self.world_size > 1 and os.environ.get(_AGENT_STORE) != "True":
            self.store.set(f"parted/{self.rank}", "")
            if self.rank == 0:
                keys = [f"parted/{rank}" for rank in range(self.world_size)]
                self._wait(keys, "all ranks to end", give_up=True)

    def announce_failure(self, message: str, store: dist.Store | None = None) -> bool:
        """Tell all ranks that the run has failed.

        Args:
            message: why.
            store: the caller's own connection to the store.

        Returns:
            Whether this rank was the first to say so, and should print why: errors that follow from another
            rank's are noise.
        """
        mine = json.dumps({"where": self.where, "host": self.host, "message": message})
        try:
            return json.loads((store or self.store).compare_set(ABORT, "", mine))["where"] == self.where
        except (dist.DistError, RuntimeError):
            return True  # The store is gone: nobody else may be left to say it.

    def _gather_reports(self, phase: str) -> list[dict[str, Any] | None]:
        keys = self._reports(phase)
        first_contact = phase == FIRST_PHASE
        self._wait(keys, f"all ranks to finish {phase!r}", give_up=first_contact)
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def _reports(self, phase: str) -> list[str]:
        return [f"{phase}/report/{rank}" for rank in range(self.world_size)]

    def _come(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (here := self.store.check(keys)) and time.monotonic() < deadline:
            # Not the store's own wait, which complains in the log when it runs out.
            time.sleep(0.1)
        return here

    def _wait(self, keys: list[str], what: str, give_up: bool = False) -> bool:
        # Work before the reports may rightly take long (a big model from a slow disk), so only the first
        # contact gives up. A rank that fails ends this wait through the launcher or the abort watch.
        began = said = time.monotonic()
        patience = self.timeout.total_seconds()
        for key in keys:
            while not self.store.check([key]):
                try:
                    # In one go: the store's client complains in the log of every wait that runs out.
                    self.store.wait([key], self.timeout)
                except dist.DistNetworkError:
                    raise
                except (dist.DistStoreError, RuntimeError):
                    now = time.monotonic()
                    if give_up and now - began >= patience:
                        return False
                    if now - said >= patience:
                        said = now
                        print(
                            f"{self.where}: still waiting for {what}, {now - began:.0f} s so far",
                            file=sys.stderr,
                            flush=True,
                        )
        return True


def _told(error: Exception) -> str:
    # Some errors have no text, and an empty one would pass for none.
    return str(error) or type(error).__name__


def connect(timeout_seconds: float) -> World:
    """Find the other processes of the run, by the variables that torchrun sets; without them, one process.

    Raises:
        Stop: if the rendezvous store cannot be reached; said by every rank, since none can know of the
            others.
    """
    # Every neighbour is a socket and every mapped tensor a file, and the usual soft limit is 1,024.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    timeout = timedelta(seconds=timeout_seconds)
    env, host = os.environ, socket.gethostname()
    store: dist.Store = dist.HashStore()
    if "RANK" in env and "WORLD_SIZE" in env:
        store = _connect_store(timeout, host)
    return World(
        rank=int(env.get("RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        node=env.get("GROUP_RANK", host),
        host=host,
        store=store,
        timeout=timeout,
    )


def _connect_store(timeout: timedelta, host: str) -> dist.Store:
    env = os.environ
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), env.get("MASTER_PORT", "29500")
    # torchrun's agent keeps the store; without one, rank 0 does.
    is_master = env["RANK"] == "0" and env.get(_AGENT_STORE) != "True"
    try:
        # Not waiting for the others here: `agree` does, and can say who is missing.
        store = dist.TCPStore(address, int(port), None, is_master, timeout, wait_for_workers=False)
    except (ValueError, RuntimeError) as error:
        print(
            f"\nerror: rank {env['RANK']} on {host} cannot reach the rendezvous store at {address}:{port}"
            f" (MASTER_ADDR:MASTER_PORT): {error}",
            file=sys.stderr,
        )
        raise Stop(EXIT_FAILED) from error
    # A restarted run must not read what the failed one wrote.
    return dist.PrefixStore(f"ppl_eval/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def environment_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks before anything else is worth trying."""
    return {
        "torch version": torch.__version__,
        **{f"config key {name}": value for name, value in config.items()},
    }
