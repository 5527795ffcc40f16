"""One process of a run: who it is, how it reaches the others, and how it ends."""

import json
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from ppl_eval.config import activity
from ppl_eval.distributed.outcome import Failure, Stop, print_error, record_cause
from ppl_eval.distributed.start import is_first_to_ask, name_start
from ppl_eval.distributed.store import open_store

# Key of the store under which the first failure stands.
ABORT = "abort"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# A thousand ranks ask the store so often while they wait in an embedded run.
_LONGEST_PAUSE_SECONDS = 0.25


@dataclass(frozen=True)
class Process:
    """One process of a run, and what it needs to find the others.

    Attributes:
        rank: number of this process.
        world_size: processes of the run.
        local_rank: number of this process on its node.
        node: number of this node, as the launcher counts.
        host: its name.
        store: key-value store that all of them share.
        timeout: how long a process waits for another.
        start: name of this start of the run; a restarted run has another.
        embedded: whether the run is part of somebody else's program: then errors are raised, printed by
            nobody, and whoever waits for a rank that failed raises too, since no watch would end it.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    host: str
    store: dist.Store
    timeout: timedelta
    start: str
    embedded: bool = field(default=False, kw_only=True)

    @property
    def where(self) -> str:
        """This process, for messages."""
        return f"rank {self.rank} on {self.host}"

    def announce_failure(self, failure: Failure, store: dist.Store | None = None) -> bool:
        """Tell all ranks that the run has failed.

        Args:
            failure: why.
            store: the caller's own connection to the store.

        Returns:
            Whether this rank was the first to say so, and should print why: errors that follow from another
            rank's are noise.
        """
        mine = {"where": self.where, "host": self.host, "message": failure.message, "code": failure.code}
        try:
            first = (store or self.store).compare_set(ABORT, "", json.dumps(mine))
            return json.loads(first)["where"] == self.where
        except (dist.DistError, RuntimeError):
            return True  # The store is gone: no other rank may be left to report it.

    def first_failure(self, store: dist.Store | None = None) -> "Announced | None":
        """Return what the first rank that failed announced; None if none did."""
        store = store or self.store
        if not store.check([ABORT]):
            return None
        return Announced(**json.loads(store.get(ABORT)))


@dataclass(frozen=True)
class Announced:
    """The failure that ends the run, as its rank announced it.

    Attributes:
        where: that rank.
        host: its host.
        message: why.
        code: exit code of every process.
    """

    where: str
    host: str
    message: str
    code: int

    @property
    def failure(self) -> Failure:
        """What the other ranks say."""
        known = self.where in self.message
        return Failure(self.message if known else f"{self.where}: {self.message}", self.code)


def wait_for(process: Process, key: str, what: str, give_up_after: float = float("inf")) -> bool:
    """Wait for a key of the store, with a line after every timeout.

    Returns:
        Whether it came.

    Raises:
        Stop: in an embedded run, if a rank failed meanwhile.
    """
    if process.embedded:
        return _wait_attentively(process, key, give_up_after)
    began = said = time.monotonic()
    patience = process.timeout.total_seconds()
    while not process.store.check([key]):
        try:
            # In one go: the store's client complains in the log of every wait that runs out.
            with activity.waiting():
                process.store.wait([key], process.timeout)
        except dist.DistNetworkError:
            raise
        except (dist.DistStoreError, RuntimeError):
            now = time.monotonic()
            if now - began >= give_up_after:
                return False
            if now - said >= patience and not process.store.check([ABORT]):
                said = now
                print(
                    f"{process.where}: still waiting for {what}, {now - began:.0f} s so far",
                    file=sys.stderr,
                    flush=True,
                )
    return True


def _wait_attentively(process: Process, key: str, give_up_after: float) -> bool:
    """Wait for a key, and raise ``Stop`` once a rank has announced a failure."""
    began, pause = time.monotonic(), 0.001
    while not process.store.check([key]):
        if process.store.check([ABORT]):
            failed = process.first_failure()
            assert failed is not None
            raise Stop(failed.code)
        if time.monotonic() - began >= give_up_after:
            return False
        with activity.waiting():
            time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def launch_notes(env: Mapping[str, str], num_nodes: int, world_size: int) -> list[str]:
    """Return a note where the launcher started more than this run consists of: each part of the job then
    scores everything by itself.

    Args:
        env: the environment.
        num_nodes: nodes of the run.
        world_size: processes of the run.
    """
    # A step's own numbers first: a job may run one evaluation on each of its nodes on purpose.
    node_names = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    process_names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    started = [(name, "nodes", num_nodes) for name in node_names if env.get(name)][:1]
    started += [(name, "processes", world_size) for name in process_names if env.get(name)]
    for name, kind, here in started:
        if env[name].isdecimal() and int(env[name]) > here:
            return [
                f"the launcher started {env[name]} {kind} ({name}), but this run has {here}: without a "
                "common rendezvous each scores everything by itself (docs/multinode.md shows one run of all)"
            ]
    return []


def connect(timeout_seconds: float) -> Process:
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
    start = secrets.token_hex(8)
    if "RANK" in env and "WORLD_SIZE" in env:
        store, start = _connect_store(timeout, host)
    return Process(
        rank=int(env.get("RANK", "0")),
        world_size=int(env.get("WORLD_SIZE", "1")),
        local_rank=int(env.get("LOCAL_RANK", "0")),
        node=env.get("GROUP_RANK", host),
        host=host,
        store=store,
        timeout=timeout,
        start=start,
    )


def _connect_store(timeout: timedelta, host: str) -> tuple[dist.Store, str]:
    env = os.environ
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), env.get("MASTER_PORT", "29500")
    # torchrun's agent keeps the store; without one, rank 0 does.
    is_master = env["RANK"] == "0" and env.get(AGENT_STORE) != "True"
    rank, where = int(env["RANK"]), f"rank {env['RANK']} on {host}"
    try:
        opened = open_store(address, int(port), is_master=is_master, timeout=timeout)
    except ValueError as error:
        message = f"{where} has no rendezvous store (MASTER_ADDR:MASTER_PORT): {error}"
        raise _no_store(message, say=True) from error
    store = dist.PrefixStore("ppl_eval", opened)
    with activity.waiting():
        start = name_start(store, rank, int(env["WORLD_SIZE"]))
    if start is None:
        message = (
            f"rank 0 did not come within timeout_seconds; {where} waited for it at the store {address}:{port}"
            " (MASTER_ADDR:MASTER_PORT)"
        )
        raise _no_store(message, say=is_first_to_ask(store, rank))
    return dist.PrefixStore(start, store), start


def _no_store(message: str, *, say: bool) -> Stop:
    failure = Failure(message)
    if say:
        print_error(message)
    record_cause(failure)
    return Stop(failure.code)
