"""The watch beside the work: one rule for every topology and phase.

A rank whose beats stand still, and a rank that gets on with nothing though it waits for nobody, ends the job
on all ranks after ``timeout_seconds``, with one error that names host, rank, phase and last finished window.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ppl_eval.config import activity
from ppl_eval.distributed import neighbours, signals
from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.distributed.dead_man import DeadMan
from ppl_eval.distributed.heartbeat import (
    BEAT_SECONDS,
    NODE_ANSWERS_SECONDS,
    SUSPICION_SECONDS,
    Heartbeats,
)
from ppl_eval.distributed.outcome import EXIT_FAILED, EXIT_SIGNAL, Failure, print_error, record_cause
from ppl_eval.distributed.process import Announced, Process
from ppl_eval.distributed.progress import Progress, place
from ppl_eval.distributed.rendezvous import World

_POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
# Where one rank is silent, others can look as if they did nothing: its silence is named first.
_OWN_SECONDS = 2 * BEAT_SECONDS


class Watch:
    """Threads beside the work, which is in a kernel or a collective that nothing can interrupt.

    One talks to the store: has a rank failed, do the ranks beat? One never talks, so that it notices when the
    first one gets no answer, and looks at this process's own progress. One waits for signals.

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
        self._leave_at, self._leave_code = float("inf"), EXIT_FAILED
        self._launcher = os.getppid()
        self._identity = neighbours.identity()
        self._gone: list[int] = []
        # What this rank found wrong with itself, for the thread that may announce it.
        self._own: Failure | None = None
        self._progress = Progress()
        self._dead_man: DeadMan | None = None
        self._talker: threading.Thread | None = None
        if process.world_size > 1:
            self._store = process.store.clone()  # type: ignore[attr-defined]
            self._talker = threading.Thread(target=self._talk, name="abort-watch", daemon=True)
            self._talker.start()
        threading.Thread(target=self._guard, name="store-watch", daemon=True).start()
        self._stop_listening = signals.listen(self._on_signal)

    def observe(self, world: World) -> None:
        """Watch the heartbeats of these ranks from now on."""
        if self._talker is not None:
            heartbeats = Heartbeats(self._store, world.nodes, world.rank)
            # From here on the others can say who is gone and what it was doing.
            heartbeats.beat(self._about())
            self._heartbeats = heartbeats
        self._world = world
        if self._several_nodes:
            # The others give this rank up before; on one host a neighbour ends it, or it may sleep.
            self._dead_man = DeadMan(self._longest + GRACE_SECONDS)

    def leave(self) -> None:
        """End a run that went well."""
        if self._world is not None:
            self._world.leave()

    def end(self) -> None:
        """Stop watching; this rank's silence means nothing from now on."""
        self._over.set()
        if self._talker is not None:
            self._talker.join(GRACE_SECONDS)
        self._stop_listening()

    def first_failure(self) -> Failure | None:
        """Return what ends the run, as another rank announced it; None if the store does not answer."""
        with suppress(dist.DistError, RuntimeError):
            announced = self._process.first_failure()
            return announced.failure if announced else None
        return None

    def let_others_read(self) -> None:
        """Give other hosts time to read the reason: the store may live in this rank's launcher."""
        if self._several_nodes:
            time.sleep(2 * _POLL_SECONDS)

    def leave_within(self, seconds: float, code: int) -> None:
        """End this process then, whatever it waits for."""
        self._leave_code = code
        self._leave_at = min(self._leave_at, time.monotonic() + seconds)

    def find_lost(self) -> None:
        """Give the watch time to find whose connection broke. If it does, this does not return."""
        if self._world is not None and self._process.world_size > 1:
            self._suspicious.set()
            with activity.waiting():
                time.sleep(SUSPICION_SECONDS + NODE_ANSWERS_SECONDS + 1.5 * BEAT_SECONDS)

    @property
    def _several_nodes(self) -> bool:
        return self._world is not None and len(self._world.nodes) > 1

    @property
    def _longest(self) -> float:
        return max(self._process.timeout.total_seconds(), SUSPICION_SECONDS)

    @property
    def _patience(self) -> float:
        return SUSPICION_SECONDS if self._suspicious.is_set() else self._longest

    @property
    def _limit(self) -> str:
        return f"timeout_seconds is {self._process.timeout.total_seconds():g}"

    def _on_signal(self, number: signal.Signals) -> None:
        if self._leave_at < float("inf") or self._over.is_set():
            return  # On its way out.
        kept = "; finished windows are recorded" if activity.now.window is not None else ""
        message = (
            f"{self._process.where} was stopped by {number.name} ({activity.now.describe()}){kept}; the same"
            " command starts it again"
        )
        self._end_by_itself(Failure(message, EXIT_SIGNAL + number))

    def _end_by_itself(self, failure: Failure) -> None:
        if self._talker is None:
            self._exit(failure, say=True)
        self._own = self._own or failure
        # In case the store does not answer.
        self.leave_within(GRACE_SECONDS, failure.code)

    def _talk(self) -> None:
        while not self._over.wait(0.1 if self._own else _POLL_SECONDS):
            try:
                announced = self._look()
            except (dist.DistError, RuntimeError) as error:
                if not self._over.is_set():
                    gone = Failure(f"{self._store_host()} is gone: {error}")
                    self._exit(self._own or gone, say=self._process.local_rank == 0, grace=GRACE_SECONDS)
                return
            self._answered = time.monotonic()
            if announced is None or self._over.is_set():
                continue
            if announced.where == self._process.where:
                return  # The work itself failed and is on its way out.
            say = announced.host != self._process.host and self._process.local_rank == 0
            self._exit(announced.failure, say=say)
            return
        if self._heartbeats is not None:
            # If the store ended first, everybody is done.
            with suppress(dist.DistError, RuntimeError):
                self._heartbeats.leave()

    def _look(self) -> Announced | None:
        """Return the reason why the run must end, if another rank gave it; end it for one found here."""
        process, store = self._process, self._store
        announced = process.first_failure(store)
        if announced is not None:
            return announced
        failure = self._own
        lost: list[int] = []
        if failure is not None and failure.code > EXIT_SIGNAL:
            # The launcher ends all ranks of a node when one of them is killed.
            failure = self._find_gone(fresh=True) or failure
        elif failure is None:
            failure, lost = self._find_lost()
        if failure is None:
            return None
        first = process.announce_failure(failure, store)
        for rank in lost:
            # A stopped process would keep its launcher waiting.
            if self._heartbeats is not None and (mate := self._heartbeats.process_of(rank)):
                neighbours.end(mate)
        if first:
            self._exit(failure, say=True)
        return process.first_failure(store)

    def _find_lost(self) -> tuple[Failure | None, list[int]]:
        if self._heartbeats is None or time.monotonic() - self._beaten < BEAT_SECONDS:
            return None, []
        self._beaten = time.monotonic()
        if self._suspicious.is_set():
            self._heartbeats.watch_all_hosts()
        self._heartbeats.beat(self._about())
        gone = self._find_gone()
        if gone is not None:
            return gone, []
        lost = self._heartbeats.lost(self._patience)
        if lost is None:
            return None, []
        return Failure(f"{lost.message}; {self._limit}"), lost.ranks

    def _about(self) -> dict[str, Any]:
        return {**activity.now.about(), "process": self._identity}

    def _find_gone(self, fresh: bool = False) -> Failure | None:
        """Return which process of this node ended without a word; seen twice, since beats may be old."""
        if self._heartbeats is None:
            return None
        beats = self._heartbeats.beats_of_mates(fresh)
        gone = [rank for rank, beat in beats.items() if neighbours.is_gone(beat.get("process", ""))]
        again, self._gone = [rank for rank in gone if rank in self._gone or fresh], gone
        if not again:
            return None
        beat = beats[again[0]]
        return Failure(
            f"rank {rank_ranges(again)} on {self._process.host} is gone without a word"
            f" ({activity.describe(beat['phase'], beat['window'])}): it was killed (SIGKILL), as the"
            " system does when memory runs out: see dmesg"
        )

    def _guard(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            now = time.monotonic()
            if self._dead_man is not None:
                self._dead_man.wind()
            if now - self._ticked > SUSPICION_SECONDS:
                self._answered = now  # This process slept; so did the other thread.
                self._progress.forgive()
            self._ticked = now
            if now > self._leave_at:
                failure = self._own or Failure("", self._leave_code)
                self._exit(failure, say=self._own is not None)
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._launcher:
                gone = f"the launcher of {self._process.host} (process {self._launcher}) is gone"
                self._exit(Failure(gone), say=self._process.local_rank == 0)
            self._look_at_itself()
            silence = now - self._answered
            if self._talker is not None and silence > self._patience:
                silent = f"no answer for {silence:.0f} s ({self._limit})"
                message = f"{self._store_host()} cannot be reached: {silent}"
                if self._several_nodes and "TORCHELASTIC_RUN_ID" in os.environ:
                    neighbours.hang_up(self._launcher)
                self._exit(Failure(message), say=self._process.local_rank == 0, grace=GRACE_SECONDS)
        if self._dead_man is not None:
            self._dead_man.stop()

    def _look_at_itself(self) -> None:
        still = self._progress.look()
        if still > self._longest + _OWN_SECONDS and self._leave_at == float("inf"):
            message = (
                f"{self._process.where} makes no progress: nothing was done for {still:.0f} s"
                f" ({activity.now.describe()}), at {place()}; {self._limit}: raise it if this"
                " work may take so long"
            )
            self._end_by_itself(Failure(message))

    def _store_host(self) -> str:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if self._world is None:
            return f"the rendezvous store at {address}"
        first = self._world.nodes[0]
        ranks = rank_ranges(first.ranks)
        return f"host {first.host} (rank {ranks}), which keeps the rendezvous store at {address},"

    def _exit(self, failure: Failure, *, say: bool, grace: float = 0.0) -> None:
        """End this process, after ``grace`` unless it says why; the main thread may end it before."""
        if failure.message:
            record_cause(failure)
        if say:
            print_error(failure.message)
        if not self._over.wait(0.0 if say else grace):
            os._exit(failure.code)
