"""Which ranks are alive: each writes its beats to the store, and few enough read each other's.

A rank that fails says so. One that was stopped, or whose machine lost its power, its network or its launcher,
cannot, and the others would wait in a collective: beats that stand still show it. The first rank of a node
watches the others of its node and the first ranks of all nodes, the second one watches the first: everybody
is watched, and nobody reads more than one message a beat.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ppl_eval.config.activity import describe
from ppl_eval.distributed.agreement import Node, rank_ranges

BEAT_SECONDS = 2.0
# A broken connection and beats that stood still for so long are enough together; either alone is not.
SUSPICION_SECONDS = 3 * BEAT_SECONDS
# After so long without a beat of a node's first rank, its other ranks are watched too, to tell whether the
# rank is lost or the host.
_ASK_NODE_SECONDS = SUSPICION_SECONDS
NODE_ANSWERS_SECONDS = 2.5 * BEAT_SECONDS
LEFT = b"left"
_NOTHING = b"{}"


@dataclass
class _Seen:
    beat: bytes
    changed: float
    since: float


@dataclass(frozen=True)
class Lost:
    """Ranks without a sign of life.

    Attributes:
        message: for the person.
        ranks: which.
    """

    message: str
    ranks: list[int]


class Heartbeats:
    """The beats of the other ranks, as one rank sees them.

    Args:
        store: what the ranks share.
        nodes: the nodes of the run.
        rank: this one.
        clock: seconds that only go up.
    """

    def __init__(
        self, store: dist.Store, nodes: Sequence[Node], rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.nodes, self.rank = nodes, rank
        self._store, self._clock = store, clock
        self._beats = 0
        self._looked = clock()
        self._seen: dict[int, _Seen] = {}
        (self._mates,) = (node.ranks for node in nodes if rank in node.ranks)
        position = self._mates.index(rank)
        if position == 0:
            self._watch([*self._mates[1:], *(node.ranks[0] for node in nodes if rank not in node.ranks)])
        elif position == 1:
            self._watch(self._mates[:1])

    def watch_all_hosts(self) -> None:
        """Watch this node and the first rank of every other: a connection of this rank broke."""
        self._watch([*self._mates, *(node.ranks[0] for node in self.nodes)])

    def beat(self, about: dict[str, Any]) -> None:
        """Write this rank's beat and read those it watches: two messages, however many ranks there are.

        Args:
            about: what the rank is doing (``Activity.about``), and its ``process``.
        """
        self._beats += 1
        self._store.set(_key(self.rank), json.dumps({"beats": self._beats, **about}))
        beats = self._read(list(self._seen))
        now = self._clock()
        # Who slept (a stopped process, a closed lid) cannot say how long others were silent.
        slept = now - self._looked > SUSPICION_SECONDS
        self._looked = now
        for rank, beat in beats.items():
            seen = self._seen[rank]
            if slept or beat != seen.beat:
                seen.beat, seen.changed = beat, now
                seen.since = now if slept else seen.since
        for node in self.nodes:
            first = self._seen.get(node.ranks[0])
            if first is not None and first.beat != LEFT and now - first.changed >= _ASK_NODE_SECONDS:
                self._watch(node.ranks)

    def leave(self) -> None:
        """Mark this rank as done, so that its silence means nothing."""
        self._store.set(_key(self.rank), LEFT.decode())

    def lost(self, limit_seconds: float) -> Lost | None:
        """Return the ranks whose beats stood still for longer; None if there are none."""
        messages, ranks = [], []
        for node in self.nodes:
            silent = [rank for rank in node.ranks if self._is_silent(rank, limit_seconds)]
            if not silent:
                continue
            others = [self._seen[rank] for rank in node.ranks if rank in self._seen and rank not in silent]
            host_is_silent = self.rank not in node.ranks and not any(
                seen.beat == LEFT or self._looked - seen.changed < NODE_ANSWERS_SECONDS for seen in others
            )
            if any(self._looked - seen.since < NODE_ANSWERS_SECONDS for seen in others):
                continue  # Asked too lately to tell the host from the rank.
            messages.append(self._describe(node, silent, host_is_silent))
            ranks += node.ranks if host_is_silent else silent
        return Lost("; ".join(messages), ranks) if messages else None

    def beats_of_mates(self, fresh: bool = False) -> dict[int, dict[str, Any]]:
        """Return the last beats of other ranks of this node that have not left, by rank.

        Args:
            fresh: read those of all; else those that this rank watches, as it saw them last.
        """
        mates = [rank for rank in self._mates if rank != self.rank and (fresh or rank in self._seen)]
        if fresh:
            self._watch(mates, keep=False)
        beats = self._read(mates) if fresh else {rank: self._seen[rank].beat for rank in mates}
        return {rank: json.loads(beat) for rank, beat in beats.items() if beat != LEFT}

    def process_of(self, rank: int) -> str | None:
        """Return the process (``neighbours.identity``) of a rank of this node, as far as it is known."""
        return self.beats_of_mates().get(rank, {}).get("process")

    def _describe(self, node: Node, silent: list[int], host_is_silent: bool) -> str:
        first = self._seen[silent[0]]
        about = json.loads(first.beat)
        state = f" ({describe(about['phase'], about.get('window'))})" if "phase" in about else ""
        seconds = f"{self._looked - first.changed:.0f} s"
        if host_is_silent:
            who = f"host {node.host} (rank {rank_ranges(node.ranks)})"
            return f"{who} cannot be reached: nothing was heard for {seconds}{state}"
        who = f"rank {rank_ranges(silent)} on {node.host}"
        return f"{who} does not answer: no sign of life for {seconds}{state}"

    def _is_silent(self, rank: int, limit_seconds: float) -> bool:
        seen = self._seen.get(rank)
        return seen is not None and seen.beat != LEFT and self._looked - seen.changed > limit_seconds

    def _watch(self, ranks: Sequence[int], keep: bool = True) -> None:
        now = self._clock()
        new = [rank for rank in ranks if rank != self.rank and rank not in self._seen]
        make_readable(self._store, new)
        if keep:
            self._seen |= {rank: _Seen(_NOTHING, now, now) for rank in new}

    def _read(self, ranks: Sequence[int]) -> dict[int, bytes]:
        return read_beats(self._store, ranks)


def make_readable(store: dist.Store, ranks: Sequence[int]) -> None:
    """Let the beats of ranks be read that have not written any: reading a missing key would wait for it."""
    for rank in ranks:
        store.compare_set(_key(rank), "", _NOTHING.decode())


def read_beats(store: dist.Store, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return the last beat of each rank, as it was written: JSON, or ``LEFT``."""
    return dict(zip(ranks, store.multi_get([_key(rank) for rank in ranks]), strict=True)) if ranks else {}


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
