"""FSDP: each rank keeps its share of every parameter, loads only that, and gathers one layer at a time during
the forward.
"""

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.config import activity
from ppl_eval.models.decoder import Decoder


class Slice(NamedTuple):
    """The part [start, stop) along dimension ``dim`` that this rank keeps of a checkpoint tensor with
    ``size`` there.
    """

    dim: int
    start: int
    stop: int
    size: int


def return_freed_memory() -> None:
    """Let glibc give tensors of 1 MiB and more back to the system as soon as they are freed.

    By itself it raises that limit to the size of the largest freed so far, up to 32 MiB. Layers that come and
    go then leave holes that the next does not fit into: a sharded model took as much memory as a whole one.
    """
    m_mmap_threshold = -3
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(m_mmap_threshold, 2**20)


class _HostGather:
    """FSDP's gather of a unit's shards, for CPU and gloo: in place and, inside layers, into one buffer.

    gloo's own all-gather makes a copy of what it gathers, and FSDP keeps a unit's gathered shards until those
    of the next have come, to overlap streams that a CPU does not have: three copies of a layer instead of
    one.

    Args:
        reuse: keep the buffer for the next unit; units must be alike, and used one after the other.
    """

    def __init__(self, reuse: bool) -> None:
        self.reuse = reuse
        self.buffer = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory for a unit's shards, one after the other."""
        if not self.reuse:
            return torch.empty(*size, dtype=dtype, device=device)
        (numel,) = size
        if self.buffer.numel() < numel or self.buffer.dtype != dtype:
            self.buffer = torch.empty(numel, dtype=dtype, device=device)
        return self.buffer[:numel]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor``, of which ``input_tensor`` is this rank's part, from all ranks."""
        parts = output_tensor.chunk(group.size())
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr()
        sent = [dist.broadcast(part, group=group, group_src=i, async_op=True) for i, part in enumerate(parts)]
        with activity.waiting():
            for work in sent:
                work.wait()


def shard_model(
    model: nn.Module,
    decoder: Decoder,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    whole_layers: bool = False,
) -> list[str]:
    """Shard parameters with FSDP2: every decoder layer, the embedding and the head are units, the final norm
    stays with the root.

    On CPU every matrix of a layer is a unit as well. FSDP has a unit twice while it fills its parameters from
    what the ranks sent, so a layer in one piece would take two layers of memory. A GPU keeps whole
    layers: more and smaller messages would cost it more than the memory is worth.

    The head is a unit of its own (the embedding, where the two are tied), so that its largest matrix is whole
    on a rank only while the scorer uses it: see ``whole_head``.

    Args:
        model: the module whose forward runs the decoder and the head; becomes the FSDP root.
        decoder: the decoder inside it, on the meta device or not.
        mesh: (shard,) or (replicate, shard).
        reshard_after_forward: free gathered parameters after each unit. False keeps all but the head:
            faster from the second batch on, and every rank ends up with the whole model in memory.
        cpu_offload: keep the shards in host memory between uses.
        whole_layers: layers are in one piece on a CPU too: to be compiled they must be.

    Returns:
        Notes on settings that had no effect.
    """
    policy, notes = _offload(cpu_offload, mesh)
    if mesh.device_type == "cpu":
        return_freed_memory()
    one_buffer, own_buffer = _HostGather(reuse=True), _HostGather(reuse=False)

    def shard(unit: nn.Module, reshard: bool, gather: _HostGather) -> None:
        fully_shard(unit, mesh=mesh, offload_policy=policy, reshard_after_forward=reshard)
        if mesh.device_type == "cpu":
            unit.set_custom_all_gather(gather)  # type: ignore[operator]

    usual = decoder.embed_unit().weight.dtype
    in_pieces = mesh.device_type == "cpu" and not whole_layers
    for layer in decoder.layers:
        for module in layer.modules():
            # A unit has one dtype.
            odd = any(parameter.dtype != usual for parameter in module.parameters(recurse=False))
            if odd or (in_pieces and isinstance(module, nn.Linear)):
                shard(module, reshard_after_forward, one_buffer)
        shard(layer, reshard_after_forward, one_buffer)
    shard(decoder.embed_unit(), reshard_after_forward, own_buffer)
    head = decoder.head_unit()
    if head is not None:
        # Not after its forward, which runs once a chunk: whole_head gives it back.
        shard(head, False, own_buffer)
    shard(model, reshard_after_forward, own_buffer)
    return notes


def _offload(asked: bool, mesh: DeviceMesh) -> tuple[OffloadPolicy, list[str]]:
    if asked and mesh.device_type == "cpu":
        return OffloadPolicy(), ["fsdp_cpu_offload has no effect on the CPU device"]
    return CPUOffloadPolicy() if asked else OffloadPolicy(), []


@contextmanager
def whole_head(decoder: Decoder) -> Iterator[None]:
    """Keep the head's matrix whole for the length of the block, however many times ``decoder.head`` is
    called in it.

    Without FSDP this does nothing. With it, a tied head reads the embedding's weight without going through
    the embedding's forward, so no hook would gather it; and an untied head would be gathered anew for every
    chunk.
    """
    unit = decoder.head_unit() or decoder.embed_unit()
    if not isinstance(unit, FSDPModule):
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def materialize(model: nn.Module, decoder: Decoder, device: torch.device, cpu_offload: bool = False) -> None:
    """Allocate what this rank keeps of a model that was built on the meta device, and compute the
    tensors that no checkpoint holds.

    Parameters are uninitialised until ``load_parameters``.

    Args:
        model: the module that holds everything, sharded or not.
        decoder: the decoder in it.
        device: where it computes.
        cpu_offload: whether its parameters wait in host memory (``shard_model``).
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    decoder.init_buffers(device)


@torch.no_grad()
def load_parameters(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    slices: Mapping[str, Slice] | None = None,
    weights: WeightsHash | None = None,
    speaks_for_peers: bool = True,
) -> None:
    """Copy checkpoint tensors into the parameters, of each only the part that this rank keeps, and into the
    buffers that checkpoints hold.

    Tensors are asked for one at a time and not kept: with a state dict that maps files on demand no rank ever
    has the whole model in memory, and it reads the pages of its own slices only (of a split along rows; one
    along columns reads the whole tensor through).

    Args:
        model: the materialised decoder, sharded or not.
        tensors: whole tensors under the parameters' names, checked beforehand for names and shapes; cast to
            the parameters' dtype.
        slices: what tensor parallelism keeps of some of them (``tensor_parallel.split_model``).
        weights: takes the hash of what is read.
        speaks_for_peers: whether this rank counts, in that hash, the rows that its tensor-parallel peers keep
            too.
    """
    for name, parameter in model.named_parameters():
        activity.tick()
        kept = slices.get(name) if slices else None
        whole = tensor = tensors[name]
        first, rows_are_split = 0, False
        if kept is not None:
            assert tensor.shape[kept.dim] == kept.size, f"{name}: {tuple(tensor.shape)} does not have {kept}"
            tensor = tensor.narrow(kept.dim, kept.start, kept.stop - kept.start)
            rows_are_split = kept.dim == 0
            first = kept.start if rows_are_split else 0
        assert tensor.shape == parameter.shape, f"{name}: {tuple(tensor.shape)} for {tuple(parameter.shape)}"
        target: torch.Tensor = parameter
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
                # An empty share starts past the end.
                tensor = tensor.narrow(dim, start if length else 0, length)
            first += offset[0]
            rows_are_split = rows_are_split or _tp_splits_rows(parameter)
            target = parameter.to_local()
        rows = (first, first + tensor.shape[0])
        counted = rows_are_split or speaks_for_peers
        with weights.reading(name, whole, rows, counted=counted) if weights else nullcontext():
            target.copy_(tensor)
    # Buffers are whole on every rank: the first part of each copy of the model counts them.
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            counted = weights is not None and weights.part == 0
            with weights.reading(name, tensors[name], counted=counted) if weights else nullcontext():
                buffer.copy_(tensors[name])


def _tp_splits_rows(parameter: DTensor) -> bool:
    # As a user's tensor_parallel_plan does; the built-in one leaves plain tensors.
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_shard(0)
