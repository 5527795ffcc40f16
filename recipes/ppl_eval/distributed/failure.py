"""Failing together: a failure of one rank or of a host ends all ranks, and its cause is printed once."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.distributed.heartbeat import BEAT_SECONDS, SUSPICION_SECONDS, Heartbeats
from ppl_eval.distributed.process import ABORT, EXIT_BAD_INPUT, EXIT_FAILED, Process, Stop
from ppl_eval.distributed.rendezvous import World

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 5.0
# Words of what gloo and nccl raise when a connection breaks: on ranks that did nothing wrong, too.
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")


@contextmanager
def fail_together(process: Process, clean_up: Callable[[], None] = lambda: None) -> Iterator["Watch"]:
    """While inside, a failure of any rank ends all of them within seconds, and its cause is printed once.

    Args:
        process: this one.
        clean_up: called on every way out. It closes connections, which others must not take for the cause:
            so it comes after the announcement.

    Yields:
        The watch, which has to be given the ``World`` once the processes have met.

    Raises:
        Stop: in the place of a ValueError or OSError, which is printed as it was written for the person, and
            of errors that only follow from another rank's. Any other exception passes through, for its
            traceback.
    """
    watch = Watch(process)
    try:
        with _cleaning(clean_up), _announcing(process, watch):
            yield watch
        watch.leave()
    finally:
        watch.end()


@contextmanager
def _cleaning(clean_up: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(Exception):  # What goes wrong in a run that failed already is not its cause.
            clean_up()
        raise
    clean_up()


@contextmanager
def _announcing(process: Process, watch: "Watch") -> Iterator[None]:
    try:
        yield
    except Stop:
        raise
    except BaseException as error:
        if _is_connection(error):
            watch.find_lost_host()
        # Cleaning up may wait for others that will never answer.
        watch.leave_within(2 * _GRACE_SECONDS)
        first = process.announce_failure(f"{type(error).__name__}: {error}")
        for_person = isinstance(error, ValueError | OSError | KeyboardInterrupt)
        if first and for_person:
            print(f"\nerror: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
        watch.let_others_read()
        if for_person or not first:
            raise Stop(EXIT_BAD_INPUT if first else EXIT_FAILED) from error
        raise


def _is_connection(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)


class Watch:
    """Two threads beside the work, which is in a kernel or a collective that nothing can interrupt.

    One talks to the store: has a rank failed, do all nodes beat? The other never talks, so that it notices
    when the first one gets no answer. A run of one process needs neither.

    Args:
        process: this one.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world: World | None = None
        self._heartbeats: Heartbeats | None = None
        self._over, self._suspicious = threading.Event(), threading.Event()
        self._answered = self._ticked = time.monotonic()
        self._beaten = 0.0
        self._leave_at = float("inf")
        self._launcher = os.getppid()
        self._talker: threading.Thread | None = None
        if process.world_size > 1:
            self._store = process.store.clone()  # type: ignore[attr-defined]
            self._talker = threading.Thread(target=self._talk, name="abort-watch", daemon=True)
            self._talker.start()
            threading.Thread(target=self._guard, name="store-watch", daemon=True).start()

    def observe(self, world: World) -> None:
        """Watch the heartbeats of these nodes from now on."""
        self._world = world

    def leave(self) -> None:
        """End a run that went well."""
        if self._world is not None:
            self._world.leave()

    def end(self) -> None:
        """Stop watching; this node's silence means nothing from now on."""
        self._over.set()
        if self._talker is not None:
            self._talker.join(_GRACE_SECONDS)

    def let_others_read(self) -> None:
        """Give other hosts time to read the reason: the store may live in this rank's launcher."""
        if self._several_nodes:
            time.sleep(2 * _POLL_SECONDS)

    def leave_within(self, seconds: float) -> None:
        """End this process then, whatever it waits for."""
        self._leave_at = min(self._leave_at, time.monotonic() + seconds)

    def find_lost_host(self) -> None:
        """Give the heartbeats time to show whose connection broke. If they do, this does not return."""
        if self._several_nodes:
            self._suspicious.set()
            time.sleep(SUSPICION_SECONDS + BEAT_SECONDS + _POLL_SECONDS)

    @property
    def _several_nodes(self) -> bool:
        return self._world is not None and len(self._world.nodes) > 1

    @property
    def _patience(self) -> float:
        longest = max(self._process.timeout.total_seconds(), SUSPICION_SECONDS)
        return SUSPICION_SECONDS if self._suspicious.is_set() else longest

    def _talk(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                reason = self._look()
            except (dist.DistError, RuntimeError) as error:
                if not self._over.is_set():
                    self._exit(f"{self._store_host()} is gone: {error}", _GRACE_SECONDS)
                return
            self._answered = time.monotonic()
            if reason is None or self._over.is_set():
                continue
            if reason["where"] == self._process.where:
                return  # The work itself failed and is on its way out.
            text = f"{reason['where']} failed: {reason['message']}"
            # The launcher of this node should find the rank that failed before those that only follow.
            same_host = reason["host"] == self._process.host
            self._exit(None if same_host else text, _GRACE_SECONDS)
            return
        if self._heartbeats is not None:
            # If the store ended first, everybody is done.
            with suppress(dist.DistError, RuntimeError):
                self._heartbeats.leave()

    def _look(self) -> dict[str, Any] | None:
        """Return the reason why the run must end, if there is one."""
        process, world, store = self._process, self._world, self._store
        if store.check([ABORT]):
            return json.loads(store.get(ABORT))
        # One rank of each node is enough, until a connection breaks that is not its own.
        listens = process.local_rank == 0 or self._suspicious.is_set()
        if (
            world is None
            or len(world.nodes) < 2
            or not listens
            or time.monotonic() - self._beaten < BEAT_SECONDS
        ):
            return None
        self._beaten = time.monotonic()
        if self._heartbeats is None:
            self._heartbeats = Heartbeats(store, world.nodes, world.node, world.local_rank == 0)
        self._heartbeats.beat()
        lost = self._heartbeats.silent(self._patience)
        if lost is None:
            return None
        message = f"{lost} (timeout_seconds is {world.timeout.total_seconds():g})"
        if world.announce_failure(message, store):
            if world.local_rank != 0:
                print(f"\nerror: {message}", file=sys.stderr, flush=True)
            self._exit(message, 0.0, "error: ")
        return json.loads(store.get(ABORT))

    def _guard(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            now = time.monotonic()
            if now - self._ticked > SUSPICION_SECONDS:
                self._answered = now  # This process slept; so did the other thread.
            self._ticked = now
            if now > self._leave_at:
                os._exit(EXIT_FAILED)
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._launcher:
                self._exit(f"the launcher of {self._process.host} (process {self._launcher}) is gone", 0.0)
            silence = now - self._answered
            if silence > self._patience:
                message = (
                    f"{self._store_host()} cannot be reached: no answer for {silence:.0f} s"
                    f" (timeout_seconds is {self._process.timeout.total_seconds():g})"
                )
                self._exit(message, _GRACE_SECONDS, "error: ", launcher_too=True)

    def _store_host(self) -> str:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if self._world is None:
            return f"the rendezvous store at {address}"
        first = self._world.nodes[0]
        ranks = rank_ranges(first.ranks)
        return f"host {first.host} (rank {ranks}), which keeps the rendezvous store at {address},"

    def _exit(self, message: str | None, grace: float, prefix: str = "", launcher_too: bool = False) -> None:
        """End this process; the first rank of a host prints why, and the others give it time to."""
        if self._process.local_rank == 0:
            if message:
                text = message if prefix else f"{self._process.where} stops: {message}"
                print(f"\n{prefix}{text}", file=sys.stderr, flush=True)
            grace = 0.0 if message else grace
        if not self._over.wait(grace):
            in_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and self._launcher != 1
            if launcher_too and in_torchrun and self._process.local_rank == 0 and self._several_nodes:
                # torchrun waits in its own call to that store until TCP gives up, a quarter of an hour, and
                # handles no signal meanwhile.
                os.kill(self._launcher, signal.SIGKILL)
            os._exit(EXIT_FAILED)
