"""Degrees of parallelism and the device mesh: which ranks hold which part of the model, and which score which
windows.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Outermost first: neighbouring ranks, which share a host, are tensor-parallel peers. The names are
# torchtune's.
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
CONFIG_KEYS = {
    "dp_replicate": "data_parallel_replicate_dim",
    "dp_shard": "data_parallel_shard_dim",
    "cp": "context_parallel_dim",
    "tp": "tensor_parallel_dim",
}
_INFER = -1
_SUGGESTIONS = 3


@dataclass
class ParallelDims:
    """Degrees whose product is the number of processes; the fields and their meaning are those of torchtune's
    main branch.

    Attributes:
        dp_replicate: copies of the model that share nothing; -1 infers it.
        dp_shard: ranks over which FSDP splits each copy; -1 infers it (one of the two at most).
        cp: ranks over which the sequence is split.
        tp: ranks over which the layers and the vocabulary are split.
        world_size: processes.

    Raises:
        ValueError: if a degree is not a positive number, or the product is not ``world_size``.
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    world_size: int

    @classmethod
    def from_settings(cls, settings: Any, world_size: int) -> "ParallelDims":
        """Read degrees from the config's keys; without ``data_parallel_replicate_dim`` what the others leave.

        Raises:
            ValueError: if they do not fit the number of processes.
        """
        degrees = {axis: getattr(settings, key) for axis, key in CONFIG_KEYS.items()}
        if degrees["dp_replicate"] is None:
            degrees["dp_replicate"] = 1 if degrees["dp_shard"] == _INFER else _INFER
        return cls(**degrees, world_size=world_size)

    def __post_init__(self) -> None:
        """Infer the degree that is -1 and check the product."""
        inferred = [axis for axis in AXES if getattr(self, axis) == _INFER]
        for axis in AXES:
            degree = getattr(self, axis)
            may_infer = axis.startswith("dp_")
            if not isinstance(degree, int) or not (degree >= 1 or (degree == _INFER and may_infer)):
                allowed = "a positive number, or -1 to infer it" if may_infer else "a positive number"
                raise ValueError(f"{CONFIG_KEYS[axis]} is {degree!r}; it must be {allowed}")
        if len(inferred) > 1:
            keys = " and ".join(CONFIG_KEYS[axis] for axis in inferred)
            raise ValueError(
                f"{keys} are both -1; only one of them can be inferred from the number of processes"
            )
        if inferred:
            others = math.prod(getattr(self, axis) for axis in AXES if axis != inferred[0])
            # A remainder shows in the product below; at least 1 keeps that message about whole degrees.
            setattr(self, inferred[0], max(1, self.world_size // others))
        if math.prod(self.degrees) != self.world_size:
            raise ValueError(self._mismatch())

    def _mismatch(self) -> str:
        product = math.prod(self.degrees)
        shown = " x ".join(f"{CONFIG_KEYS[axis]} {getattr(self, axis)}" for axis in AXES)
        choices = "; ".join(
            ", ".join(
                f"{CONFIG_KEYS[axis]}={degree}"
                for axis, degree in zip(AXES, degrees, strict=True)
                if degree != getattr(self, axis)
            )
            for degrees in _nearest(self.degrees, self.world_size)
        )
        return (
            f"{shown} = {product}, but there are {self.world_size} processes. Start {product} "
            f"processes, or use the nearest degrees that fit {self.world_size}: {choices}"
        )

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """Return the degrees in the order of ``AXES``."""
        return self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def dp_degree(self) -> int:
        """Return the data ranks (``num_replicas`` of a sampler): groups that score different windows."""
        return self.dp_replicate * self.dp_shard

    @property
    def peers(self) -> int:
        """Return how many processes score the same windows together: cp x tp."""
        return self.cp * self.tp

    @property
    def forwards_are_shared(self) -> bool:
        """Return whether ranks meet in collectives in every forward, so that all must make the same ones in
        step.
        """
        return self.dp_shard > 1 or self.peers > 1

    def dp_rank(self, rank: int) -> int:
        """Return the data rank of a process; tensor- and context-parallel peers share it."""
        return rank // self.peers

    def is_counted(self, rank: int) -> bool:
        """Return whether this process's scores go into the totals: those of one process a group of peers
        do.
        """
        return rank % self.peers == 0

    @property
    def fsdp_enabled(self) -> bool:
        """Return whether parameters are sharded; context-parallel ranks share them like FSDP ranks do."""
        return self.dp_shard * self.cp > 1

    @property
    def cp_enabled(self) -> bool:
        """Return whether the sequence is split."""
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether layers are split."""
        return self.tp > 1

    def check_quantized(self) -> None:
        """Refuse degrees that would split quantised weights.

        Raises:
            ValueError: if layers or parameters would be sharded.
        """
        for axis in ("tp", "dp_shard"):
            if getattr(self, axis) > 1:
                raise ValueError(
                    f"quantised weights cannot be split, and {CONFIG_KEYS[axis]} is {getattr(self, axis)}; "
                    f"give every process a copy: {CONFIG_KEYS['dp_replicate']}: -1, "
                    f"{CONFIG_KEYS['dp_shard']}: 1, {CONFIG_KEYS['tp']}: 1"
                )

    def build_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh with one named axis for each degree above 1, or None for a single process.

        Args:
            device_type: ``"cuda"`` or ``"cpu"``.
        """
        if self.world_size == 1:
            return None
        named = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}
        return init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))


def fsdp_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    """Return the mesh for ``fully_shard``: (replicate, shard) for hybrid sharding, else (shard,).

    Context-parallel ranks hold the same weights, so they share them out too: the shard axis is ``dp_shard`` x
    ``cp``.

    Args:
        mesh: what ``build_mesh`` returned for ``dims``.
        dims: the degrees; ``dims.fsdp_enabled`` must hold.
    """
    assert dims.fsdp_enabled
    if dims.dp_shard > 1 and dims.cp > 1:
        shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    else:
        shard = mesh["dp_shard" if dims.dp_shard > 1 else "cp"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard]) if dims.dp_replicate > 1 else shard


def _nearest(degrees: tuple[int, ...], world_size: int) -> list[tuple[int, ...]]:
    """Return degrees with the right product; those that change the fewest, by the smallest factors, come
    first.
    """

    def distance(candidate: tuple[int, ...]) -> tuple[int, float]:
        changed = sum(a != b for a, b in zip(candidate, degrees, strict=True))
        return changed, sum(abs(math.log(a / b)) for a, b in zip(candidate, degrees, strict=True))

    return sorted(_factorizations(world_size, len(degrees)), key=distance)[:_SUGGESTIONS]


def _factorizations(number: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in _factorizations(number // d, parts - 1)]
