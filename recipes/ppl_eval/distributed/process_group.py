"""The process group of a run."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppl_eval.config import activity
from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.distributed.causes import NoContact, first_line
from ppl_eval.distributed.collectives import AddOverRanks, add_over_ranks
from ppl_eval.distributed.rendezvous import World

Number = TypeVar("Number", np.int64, np.float64)
# A host that is there answers in less.
_CONTACT = timedelta(seconds=30)


def choose_backend(device: torch.device, backend: str | None) -> str:
    """Return the backend of the process group: as configured, else nccl for cuda and gloo for cpu."""
    return backend or ("nccl" if device.type == "cuda" else "gloo")


@contextmanager
def naming_network(world: World, backend: str) -> Iterator[None]:
    """Turn the error of a first contact into one that names this process and its network interface.

    Raises:
        ValueError: in the place of a RuntimeError, the only one that the libraries raise.
    """
    activity.enter("first contact")
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    try:
        yield
    except RuntimeError as error:
        chosen, there = os.environ.get(variable), ", ".join(name for _, name in socket.if_nameindex())
        raise NoContact(
            f"{world.where} could not exchange data with the other ranks over {backend}: {first_line(error)}."
            f" {variable} is {chosen or 'not set'}; the interfaces of {world.host} are {there}. Set it, on"
            f" every host, to the one through which the hosts reach each other"
        ) from error


def check_groups(add: AddOverRanks, mesh: DeviceMesh | None, world: World) -> None:
    """Add numbers up over the groups of a run, so that what is wrong with them shows before any work.

    Args:
        add: sums a vector over all ranks.
        mesh: the mesh of the run, or None.
        world: the processes.

    Raises:
        RuntimeError: if ranks cannot reach each other, or a sum is wrong.
    """
    _set_timeout(min(world.timeout, _CONTACT))
    _check_sum(list(range(world.world_size)), world.rank, add)
    if mesh is None:
        return
    for group in mesh.get_all_groups():

        def add_on_axis(values: npt.NDArray[Any], group: dist.ProcessGroup = group) -> npt.NDArray[Any]:
            numbers = torch.from_numpy(values).to(mesh.device_type)
            dist.all_reduce(numbers, group=group)
            return numbers.cpu().numpy()

        _check_sum(dist.get_process_group_ranks(group), world.rank, add_on_axis)


def _check_sum(ranks: list[int], rank: int, add: AddOverRanks) -> None:
    # Above what 32 bits hold: the sum of the run is of such numbers.
    found = add(np.array([1, rank + 2**40], dtype=np.int64)).tolist()
    expected = [len(ranks), sum(ranks) + len(ranks) * 2**40]
    if found != expected:
        raise RuntimeError(f"int64 numbers of ranks {rank_ranges(ranks)} added up to {found}, not {expected}")


@contextmanager
def process_group(world: World, device: torch.device, backend: str | None) -> Iterator[None]:
    """Form the default process group, see that it works, and destroy it on every way out.

    Args:
        world: the processes. An embedded run uses the group that its program has formed, and leaves it.
        device: this rank's device.
        backend: as configured, or None.

    Raises:
        ValueError: if the processes cannot reach each other.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = choose_backend(device, backend)
    if world.embedded and dist.is_initialized():
        _check_backend(device)
        with naming_network(world, chosen):
            _check_sum(
                list(range(world.world_size)), world.rank, add_over_ranks([], world.rank, device, "flat")
            )
        yield
        return
    with naming_network(world, chosen):
        dist.init_process_group(
            chosen,
            store=dist.PrefixStore("process_group", world.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=min(world.timeout, _CONTACT),
        )
        _check_sum(list(range(world.world_size)), world.rank, add_over_ranks([], world.rank, device, "flat"))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_backend(device: torch.device) -> None:
    """Refuse a process group that cannot carry the tensors of a device."""
    backends = dist.get_backend_config()
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"device is {device.type!r}, but the process group that is in use carries no tensors of it"
            f" ({backends}): evaluate where the model is, or initialise the group with 'cpu:gloo,cuda:nccl'"
        )


def be_patient(world: World) -> None:
    """Give all groups there are a timeout that the watch, which names who is missing, is faster than."""
    if not world.embedded:  # There, groups are not ours.
        _set_timeout(2 * world.timeout + timedelta(seconds=60))


def _set_timeout(timeout: timedelta) -> None:
    # Public from torch 2.14 on, where the older name warns.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(timeout, group)


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
