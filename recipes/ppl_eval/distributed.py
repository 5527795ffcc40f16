"""The process group of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ppl_eval.world import World


def choose_backend(device: torch.device, backend: str | None) -> str:
    """The backend of the process group: as configured, else nccl for cuda and gloo for cpu."""
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


def all_gather_rows(
    row: npt.NDArray[np.float64], world_size: int, device: torch.device
) -> npt.NDArray[np.float64]:
    """One row of float64 from every rank; [world_size, N]."""
    mine = torch.from_numpy(row).to(device)
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).cpu().numpy()
