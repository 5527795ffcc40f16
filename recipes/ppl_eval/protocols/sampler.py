"""Which batches a rank runs: none twice, none left out, none padded with another rank's."""

from collections.abc import Sequence

# Index of a batch without windows: it keeps a rank in step where every forward is a collective (FSDP).
DUMMY_BATCH = -1


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
