"""From a decoder on the meta device to one that is split over the mesh and ready to be loaded, in the order
that the parts need.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.engines import scorable
from ppl_eval.parallel import context_parallel, tensor_parallel
from ppl_eval.parallel import fsdp as sharding
from ppl_eval.parallel.parallel_dims import ParallelDims, fsdp_mesh
from ppl_eval.scoring.nll import ScoringModel

NO_TP = "tensor_parallel_plan has no effect with tensor_parallel_dim: 1"


@dataclass(frozen=True)
class SplitModel:
    """A decoder that is split over the mesh.

    Attributes:
        scorer: what every rank calls, once per batch.
        slices: the parts of split parameters that this rank keeps.
        device: where it computes.
        cpu_offload: whether its parameters wait in host memory.
        notes: settings that had no effect.
        part: which part of the model this rank keeps: copies of the model have the same parts.
        speaks_for_peers: whether it is the first of its tensor-parallel peers.
    """

    scorer: ScoringModel
    slices: dict[str, sharding.Slice]
    device: torch.device
    cpu_offload: bool
    notes: list[str]
    part: int = 0
    speaks_for_peers: bool = True

    def load(self, tensors: Mapping[str, torch.Tensor], weights: WeightsHash | None = None) -> None:
        """Allocate this rank's part and fill it from whole tensors, one at a time
        (``sharding.load_parameters``); ``weights`` takes the hash of what is read.
        """
        sharding.materialize(self.scorer, self.scorer.model, self.device, self.cpu_offload)
        if weights is not None:
            weights.part = self.part
        sharding.load_parameters(self.scorer.decoder, tensors, self.slices, weights, self.speaks_for_peers)


def split_model(
    decoder: Decoder | nn.Module,
    dims: ParallelDims,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    max_logits_bytes: int,
    softmax: str = "exact",
    details: bool = False,
    shard: bool = True,
    plan: Mapping[str, ParallelStyle] | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    whole_layers: bool = False,
) -> SplitModel:
    """Split layers over ``tp``, attention over ``cp``, and parameters over ``dp_shard`` x ``cp``.

    Args:
        decoder: on the meta device, corrected, its checkpoint's names and shapes checked.
        dims: degrees.
        mesh: what ``dims.build_mesh`` returned.
        device: where this rank computes.
        max_logits_bytes: see ``ScoringModel``.
        softmax: see ``ScoringModel``.
        details: see ``ScoringModel``.
        shard: False leaves parameters whole on every rank, loaded or not: weights that cannot be split.
        plan: a user's ``tensor_parallel_plan``, which takes the place of the built-in one.
        reshard_after_forward: see ``sharding.shard_model``.
        cpu_offload: see ``sharding.shard_model``.
        whole_layers: see ``sharding.shard_model``.

    Raises:
        ValueError: if the model cannot be split so.
    """
    assert shard or not dims.tp_enabled
    notes = [NO_TP] if plan is not None and not dims.tp_enabled else []
    tp_mesh = mesh["tp"] if mesh is not None and dims.tp_enabled else None
    cp_group = mesh.get_group("cp") if mesh is not None and dims.cp_enabled else None
    slices = _split_layers(decoder := scorable(decoder), tp_mesh, cp_group, plan)
    scorer = ScoringModel(
        decoder,
        max_logits_bytes,
        softmax=softmax,
        details=details,
        vocab_group=tp_mesh.get_group() if tp_mesh is not None and plan is None else None,
        sequence_group=cp_group,
    )
    if mesh is not None and shard and dims.fsdp_enabled:
        notes += sharding.shard_model(
            scorer,
            decoder,
            fsdp_mesh(mesh, dims),
            reshard_after_forward=reshard_after_forward,
            cpu_offload=cpu_offload,
            whole_layers=whole_layers,
        )
    elif cpu_offload:
        notes.append("fsdp_cpu_offload has no effect without FSDP (data_parallel_shard_dim: 1)")
    sharded_offload = cpu_offload and dims.fsdp_enabled and device.type != "cpu"
    return SplitModel(scorer, slices, device, sharded_offload, notes, *_place_in_copy(dims, mesh))


def _place_in_copy(dims: ParallelDims, mesh: DeviceMesh | None) -> tuple[int, bool]:
    """Return which part of a copy of the model this rank holds, and whether it speaks for its tp group."""
    # tp is the innermost axis and dp_replicate the outermost: a copy of the model is a run of ranks.
    rank = 0 if mesh is None else mesh.get_rank()
    return rank % (dims.dp_shard * dims.cp * dims.tp), rank % dims.tp == 0


def _split_layers(
    decoder: Decoder,
    tp_mesh: DeviceMesh | None,
    cp_group: dist.ProcessGroup | None,
    plan: Mapping[str, ParallelStyle] | None,
) -> dict[str, sharding.Slice]:
    slices: dict[str, sharding.Slice] = {}
    if tp_mesh is not None and plan is None:
        slices = tensor_parallel.split_model(decoder, tp_mesh.get_group())
    elif tp_mesh is not None:
        assert plan is not None
        tensor_parallel.apply_plan(decoder, tp_mesh, plan)
    if cp_group is not None:
        context_parallel.split_attention(decoder, cp_group)
    return slices
