"""Which nodes are alive: one rank of each writes a counter to the store, and reads those of all others.

A rank that fails says so. A machine that loses its power, its network or its launcher cannot, and the others
would wait in a collective: a counter that stands still shows it.
"""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ppl_eval.distributed.agreement import Node, rank_ranges

BEAT_SECONDS = 2.0
# A broken connection and a counter that stood still for so long are enough together; either alone is not.
SUSPICION_SECONDS = 3 * BEAT_SECONDS
_LEFT = "left"


class Heartbeats:
    """The counters of all nodes, as one rank sees them.

    Args:
        store: what the ranks share.
        nodes: the nodes of the run.
        node: name of this one.
        writes: whether this rank writes its node's counter.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        store: dist.Store,
        nodes: Sequence[Node],
        node: str,
        writes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.nodes = nodes
        self._store, self._key, self._writes, self._clock = store, _key(node), writes, clock
        self._beats = 0
        self._looked = clock()
        self._seen = {_key(other.name): (b"0", self._looked) for other in nodes if other.name != node}
        for key in self._seen:
            # Reading a key that is not there yet would wait for it.
            store.compare_set(key, "", "0")

    def beat(self) -> None:
        """Write this node's counter and read the others': two messages, however many nodes there are."""
        if self._writes:
            self._beats += 1
            self._store.set(self._key, str(self._beats))
        counters = self._store.multi_get(list(self._seen)) if self._seen else []
        now = self._clock()
        # Who slept (a stopped process, a closed lid) cannot say how long others were silent.
        slept = now - self._looked > SUSPICION_SECONDS
        self._looked = now
        for key, counter in zip(list(self._seen), counters, strict=True):
            if slept or counter != self._seen[key][0]:
                self._seen[key] = (counter, now)

    def leave(self) -> None:
        """Mark this node as done, so that its silence means nothing."""
        if self._writes:
            self._store.set(self._key, _LEFT)

    def silent(self, limit_seconds: float) -> str | None:
        """Return the nodes whose counter stood still for longer, as text; None if there are none."""
        lost, longest = [], 0.0
        for node in self.nodes:
            counter, changed = self._seen.get(_key(node.name), (_LEFT.encode(), 0.0))
            silence = self._looked - changed
            if counter != _LEFT.encode() and silence > limit_seconds:
                lost.append(f"host {node.host} (rank {rank_ranges(node.ranks)})")
                longest = max(longest, silence)
        if not lost:
            return None
        return f"{', '.join(lost)} cannot be reached: nothing was heard for {longest:.0f} s"


def _key(node: str) -> str:
    return f"heartbeat/{node}"
