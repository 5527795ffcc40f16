"""Which batches a rank runs: none twice, none left out, none made up."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

# Index of a batch without windows: it keeps a rank in step where every forward is a collective (FSDP).
DUMMY_BATCH = -1


class ExactDistributedSampler(Sampler[int]):
    """Rank r of R runs the batches r, r + R, r + 2R, ... of the plan.

    A sibling of torchdata's ``StatefulDistributedSampler``, with the same ``state_dict``, that neither pads
    the last round with batches of others nor drops it.

    Args:
        num_batches: batches of the plan.
        num_replicas: data-parallel degree R.
        rank: data-parallel rank r.
        equal_steps: end with ``DUMMY_BATCH`` where this rank has one batch less than others.
    """

    def __init__(self, num_batches: int, num_replicas: int, rank: int, equal_steps: bool = False) -> None:
        assert 0 <= rank < num_replicas, (rank, num_replicas)
        self.num_batches, self.num_replicas, self.rank = num_batches, num_replicas, rank
        self.equal_steps = equal_steps
        self.yielded = 0
        self._next_yielded = 0

    def __len__(self) -> int:
        """Steps of this rank, dummies included."""
        rounds = -(-self.num_batches // self.num_replicas)
        return rounds if self.equal_steps else len(range(self.rank, self.num_batches, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        """Batch indices that are left to do."""
        self.yielded, self._next_yielded = self._next_yielded, 0
        for step in range(self.yielded, len(self)):
            batch = self.rank + step * self.num_replicas
            self.yielded += 1
            yield batch if batch < self.num_batches else DUMMY_BATCH

    def state_dict(self) -> dict[str, Any]:
        """How many steps were handed out."""
        return {"yielded": self.yielded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the steps that a ``state_dict`` counts."""
        yielded = state_dict["yielded"]
        if not 0 <= yielded <= len(self):
            raise ValueError(
                f"the sampler state says {yielded} steps were done, but this rank has {len(self)}"
            )
        self._next_yielded = yielded
