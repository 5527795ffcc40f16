"""Which batches a rank runs: none twice, none left out, none padded with another rank's."""

from collections.abc import Sequence

# Index of a batch without windows: it keeps a rank in step where every forward is a collective (FSDP).
DUMMY_BATCH = -1
# A chunk is one part of so many of a taker's even share of what is left: a taker that is so many times slower
# than the others still ends its largest chunk when they end the run, and a run asks for few chunks.
_PARTS_OF_SHARE = 8


def batches_of(
    rank: int, num_replicas: int, batches: Sequence[int], equal_steps: bool = False
) -> Sequence[int]:
    """Return the batches that a rank runs: of R replicas, rank r runs the r-th, the (r + R)-th, ...

    Args:
        rank: data-parallel rank r.
        num_replicas: data-parallel degree R.
        batches: those that are to be scored, ascending.
        equal_steps: end with ``DUMMY_BATCH`` where this rank has one batch less than others.

    Example:
        >>> [list(batches_of(rank, 3, range(7))) for rank in range(3)]
        [[0, 3, 6], [1, 4], [2, 5]]
        >>> list(batches_of(1, 3, range(7), equal_steps=True))
        [1, 4, -1]
    """
    assert 0 <= rank < num_replicas, (rank, num_replicas)
    own = batches[rank::num_replicas]
    most = -(-len(batches) // num_replicas)
    return [*own, DUMMY_BATCH] if equal_steps and len(own) < most else own


def chunk_bounds(num_steps: int, num_takers: int) -> list[int]:
    """Return where the chunks of a dynamic schedule begin, and where the last one ends.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987), with smaller chunks as in factoring (Hummel,
    Schonberg and Flynn, 1992): each is a fixed part of what is left, and the last ones are single steps.
    Chunk k is the same whoever takes it, so that takers need to share nothing but a counter.

    Args:
        num_steps: of the run.
        num_takers: who take chunks.

    Example:
        >>> bounds = chunk_bounds(10_000, 2)
        >>> bounds[:4], bounds[-3:], len(bounds)
        ([0, 625, 1210, 1759], [9998, 9999, 10000], 126)
    """
    bounds = [0]
    while bounds[-1] < num_steps:
        left = num_steps - bounds[-1]
        bounds.append(bounds[-1] + max(1, left // (_PARTS_OF_SHARE * num_takers)))
    return bounds
