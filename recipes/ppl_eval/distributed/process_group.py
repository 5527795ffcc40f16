"""The process group of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ppl_eval.distributed.rendezvous import World

Number = TypeVar("Number", np.int64, np.float64)


def choose_backend(device: torch.device, backend: str | None) -> str:
    """Return the backend of the process group: as configured, else nccl for cuda and gloo for cpu."""
    return backend or ("nccl" if device.type == "cuda" else "gloo")


@contextmanager
def process_group(world: World, device: torch.device, backend: str | None) -> Iterator[None]:
    """Form the default process group and destroy it on every way out.

    Args:
        world: the processes.
        device: this rank's device.
        backend: as configured, or None.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        choose_backend(device, backend),
        store=dist.PrefixStore("process_group", world.store),
        rank=world.rank,
        world_size=world.world_size,
        timeout=world.timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def all_gather_rows(row: npt.NDArray[Number], world_size: int, device: torch.device) -> npt.NDArray[Number]:
    """Gather one row of int64 or float64 from every rank; [world_size, N]."""
    mine = torch.from_numpy(row).to(device)
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu().numpy()


def divided_searches(
    world: World, device: torch.device
) -> Callable[[int, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]:
    """Divide numbered computations over the ranks: rank ``index % world_size`` computes, all get the same
    bits.

    Returns:
        A function of the number, a tensor of the result's shape and dtype, and the computation.
    """

    def share(index: int, like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        owner = index % world.world_size
        found = compute() if world.rank == owner else torch.empty_like(like, device=device)
        found = found.contiguous()
        dist.broadcast(found.view(torch.uint8), src=owner)
        return found

    return share
