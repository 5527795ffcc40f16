"""Who scores which batches: shares that are fixed beforehand, or chunks that are taken as ranks finish.

Whoever scores a batch scores the same bits, so a schedule decides nothing but when the last rank is done.
Takers of chunks are copies of the model: ranks that share one make the same forwards (FSDP, tensor and
context parallelism). They share a counter in the rendezvous store, and no collective: the number of a chunk
says which batches are in it (``sampler.chunk_bounds``). A rank that dies with a chunk ends the run, as it
does under any schedule, and a later run scores what is not recorded.
"""

from collections.abc import Iterator, Sequence
from itertools import count

from ppl_eval.distributed.process import wait_for
from ppl_eval.distributed.rendezvous import World
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.protocols.sampler import DUMMY_BATCH, batches_of, chunk_bounds
from ppl_eval.run.state import RunState

STATIC, DYNAMIC = "static", "dynamic"
_COUNTER = "schedule/chunks"


def in_use(state: RunState) -> str:
    """Return the schedule of a run.

    ``auto`` is dynamic where several copies of the model have more than a step each: it costs a message a
    chunk, and what a slow rank cannot do in time is done by the others.
    """
    asked, dims = state.settings.schedule, state.dims
    if asked != "auto":
        return asked
    num_steps = -(-(len(state.share.batches) - state.num_done) // dims.dp_shard)
    return DYNAMIC if 1 < dims.dp_replicate < num_steps else STATIC


class Schedule:
    """The batches of the plan that this rank scores, to be walked once.

    Args:
        state: the run.

    Attributes:
        num_batches: how many there are; None where that is not known beforehand.
        share: which part of the run's batches they are, as far as it is known by now.
    """

    def __init__(self, state: RunState) -> None:
        dims = state.dims
        left: Sequence[int] = state.share.batches
        if state.num_done:
            left = [batch for batch in left if not state.done[batch]]
        self.share = 1 / dims.dp_degree
        self.num_batches: int | None = None
        if in_use(state) == DYNAMIC:
            self._indices = self._taken(left, state.world, dims)
            return
        # Shards are gathered in every forward, so ranks that share them make the same number of forwards.
        rank, equal_steps = dims.dp_rank(state.world.rank), dims.dp_shard > 1
        indices = batches_of(rank, dims.dp_degree, left, equal_steps=equal_steps)
        self.num_batches = len(indices)
        self._indices = iter(indices)

    def __iter__(self) -> Iterator[int]:
        """Walk the batches, and ``DUMMY_BATCH`` where this rank only keeps others company."""
        return self._indices

    def _taken(self, left: Sequence[int], world: World, dims: ParallelDims) -> Iterator[int]:
        width = dims.dp_shard
        bounds = chunk_bounds(-(-len(left) // width), dims.dp_replicate)
        place = dims.dp_rank(world.rank) % width
        steps_here = 0
        for chunk in _chunks(world, width * dims.peers):
            if chunk >= len(bounds) - 1:
                return
            first, last = bounds[chunk : chunk + 2]
            steps_here += last - first
            self.share = steps_here / last / width
            for at in range(first * width + place, last * width, width):
                yield left[at] if at < len(left) else DUMMY_BATCH


def _chunks(world: World, ranks_of_copy: int) -> Iterator[int]:
    """Take chunks, one after the other, without end: the first rank of a copy does, and tells the others."""
    copy, place = divmod(world.rank, ranks_of_copy)
    for turn in count():
        key = f"schedule/copy/{copy}/{turn}"
        if place == 0:
            chunk = world.store.add(_COUNTER, 1) - 1
            if ranks_of_copy > 1:
                world.store.set(key, str(chunk))
        else:
            wait_for(world, key, f"rank {world.rank - place} to take the next batches")
            chunk = int(world.store.get(key))
        yield chunk
