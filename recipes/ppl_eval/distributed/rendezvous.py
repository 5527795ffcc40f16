"""The processes of a run: meeting, and agreeing before work.

Everything here goes over the rendezvous store: it works before any collective does, names who is missing, and
cannot deadlock.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ppl_eval.config import activity
from ppl_eval.distributed.agreement import Node, find_problem, group_by_node
from ppl_eval.distributed.causes import exit_code_of
from ppl_eval.distributed.outcome import EXIT_BAD_INPUT, Failure, Stop, print_error, record_cause
from ppl_eval.distributed.process import AGENT_STORE, Process, wait_for

T = TypeVar("T")

_FIRST_PHASE = "settings"
_NODES = "nodes"
_FAILED_PATIENCE_SECONDS = 5.0
_VERDICT_SECONDS = 5.0


@dataclass(frozen=True)
class World(Process):
    """The processes of a run, once they have met.

    Attributes:
        nodes: the nodes of the run, by their first rank.
        common: the store of all steps, where the heartbeats are.
    """

    nodes: tuple[Node, ...]
    common: dist.Store

    @property
    def mates(self) -> list[int]:
        """The ranks of this node."""
        return next(node.ranks for node in self.nodes if self.rank in node.ranks)

    def agree(
        self, phase: str, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]] = lambda _: {}
    ) -> T:
        """Do something on every rank, and go on only if all of them could and all came to the same facts.

        Rank 0 prints what went wrong, once, however many ranks it hits. Ranks that wait for this one inside
        the step cannot report; so a rank that failed waits some seconds for the others, then fails by itself.

        Args:
            phase: name of the step; used once a run.
            work: the step. A ValueError or OSError it raises is for the person; any other exception passes
                through.
            facts: what must be equal on all ranks, by name; JSON values.

        Returns:
            What ``work`` returned.

        Raises:
            Stop: if a rank failed or differs.
            ValueError: if this rank failed, and others did not report.
        """
        activity.enter(phase)
        report, value = _attempt(self, work, facts)
        self.store.set(f"{phase}/report/{self.rank}", report)
        error = json.loads(report)["error"]
        if error:
            awaited = _report_keys(self, phase) if self.rank == 0 else [f"{phase}/verdict"]
            if not self._arrive(awaited, _FAILED_PATIENCE_SECONDS):
                raise ValueError(f"{self.where}: {error}")
        if self.rank == 0:
            keys = _report_keys(self, phase)
            self._wait(keys, f"all ranks to finish {phase!r}")
            _give_verdict(self, phase, [json.loads(self.store.get(key)) for key in keys])
        self._wait([f"{phase}/verdict"], f"the verdict of rank 0 on {phase!r}")
        _obey_verdict(self, phase)
        return value

    def once_per_node(self, name: str, work: Callable[[], str]) -> str:
        """Let one process of each node do something, and give its neighbours the outcome.

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
                answer = {"error": _text_of(error)}
            self.store.set(key, json.dumps(answer))
        else:
            self._wait([key], f"local rank 0 of {self.host} to finish {name!r}")
            answer = json.loads(self.store.get(key))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def apart(self, name: str) -> "World":
        """Return the same processes with keys of their own in the store, for steps that are repeated."""
        return replace(self, store=dist.PrefixStore(name, self.store))

    def leave(self) -> None:
        """End a run that went well: where rank 0 keeps the store, it stays until no rank needs it."""
        if self.world_size > 1 and os.environ.get(AGENT_STORE) != "True":
            self.store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                keys = [f"left/{rank}" for rank in range(self.world_size)]
                for key in keys:
                    wait_for(self, key, "all ranks to end", self.timeout.total_seconds())

    def _arrive(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (here := self.store.check(keys)) and time.monotonic() < deadline:
            # Not the store's own wait, which complains in the log when it runs out.
            with activity.waiting():
                time.sleep(0.1)
        return here

    def _wait(self, keys: list[str], what: str) -> None:
        # Work before a report may rightly take long (a big model from a slow disk): this never gives up. A
        # rank that fails ends this wait through the launcher or the abort watch.
        for key in keys:
            wait_for(self, key, what)


def _attempt(
    process: Process, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]
) -> tuple[str, T]:
    """Do a step, and describe how it went as the JSON that the other ranks read."""
    value = cast(T, None)
    report: dict[str, Any] = {"host": process.host, "node": process.node, "error": None, "facts": {}}
    try:
        value = work()
        found = facts(value)
        report["facts"] = {key: json.dumps(fact, sort_keys=True) for key, fact in found.items()}
    except (ValueError, OSError) as error:
        report["error"], report["code"] = _text_of(error), exit_code_of(error)
    return json.dumps(report), value


def _give_verdict(process: Process, phase: str, reports: list[dict[str, Any] | None]) -> None:
    problem = find_problem(reports)
    if problem:
        # For ranks that are ended before they read the verdict.
        codes = [report["code"] for report in reports if report and report.get("code")]
        first = process.announce_failure(Failure(problem, codes[0] if codes else EXIT_BAD_INPUT))
        if first and not process.embedded:
            print_error(problem)
    elif phase == _FIRST_PHASE:
        process.store.set(_NODES, json.dumps(group_by_node(reports)))
    # Only now may the others go on: the launcher ends rank 0 as soon as one of them does.
    process.store.set(f"{phase}/verdict", "stop" if problem else "go")


def _obey_verdict(process: Process, phase: str) -> None:
    if process.store.get(f"{phase}/verdict") != b"go":
        announced = process.first_failure()
        assert announced is not None
        failure = Failure(announced.message, announced.code)
        if not process.embedded:
            if process.local_rank == 0 and process.host != announced.host:
                print_error(failure.message)
            record_cause(failure)
        raise Stop(failure.code)


def _report_keys(process: Process, phase: str) -> list[str]:
    return [f"{phase}/report/{rank}" for rank in range(process.world_size)]


def _text_of(error: Exception) -> str:
    # Some errors have no text, and an empty one would pass for none.
    return str(error) or type(error).__name__


def meet(process: Process, work: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> tuple[World, T]:
    """Wait for all processes of the run and compare what they were started with.

    Args:
        process: this one.
        work: what each has to settle by itself first (its config).
        facts: what must be equal on all ranks, by name; JSON values.

    Returns:
        The processes, and what ``work`` returned.

    Raises:
        Stop: if a rank failed, is missing within the timeout, or differs.
        ValueError: if rank 0 gives no sign any more, or a rank was started with another world size.
    """
    _check_world_size(process)
    patience = process.timeout.total_seconds()
    report, value = _attempt(process, work, facts)
    store, keys = process.store, _report_keys(process, _FIRST_PHASE)
    store.set(keys[process.rank], report)
    if process.rank == 0:
        deadline = time.monotonic() + patience
        for key in keys:
            wait_for(process, key, "all ranks to come", max(0.0, deadline - time.monotonic()))
        reports = [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
        _give_verdict(process, _FIRST_PHASE, reports)
    # Rank 0 was there, and waits for the slowest from when it came.
    if not wait_for(process, f"{_FIRST_PHASE}/verdict", "the verdict of rank 0", patience + _VERDICT_SECONDS):
        raise ValueError(f"rank 0 came and then gave no sign within timeout_seconds; {process.where} waited")
    _obey_verdict(process, _FIRST_PHASE)
    nodes = tuple(Node(*node) for node in json.loads(store.get(_NODES)))
    return World(**vars(process), nodes=nodes, common=store), value


def _check_world_size(process: Process) -> None:
    # Before they wait for that many.
    mine = {"where": process.where, "world_size": process.world_size}
    first = json.loads(process.store.compare_set("world_size", "", json.dumps(mine)))
    if first["world_size"] != process.world_size:
        raise ValueError(
            f"world size differs between ranks: {first['world_size']} on {first['where']};"
            f" {process.world_size} on {process.where} (WORLD_SIZE, which the launcher sets)"
        )


def environment_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal on all ranks before anything else is worth trying."""
    return {
        "torch version": torch.__version__,
        **{f"config key {name}": value for name, value in config.items()},
    }
