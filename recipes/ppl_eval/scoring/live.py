"""Scoring a model that is in memory already: what it is, what it agrees with, and what cannot be done."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.models.engines import scorable
from ppl_eval.scoring.nll import ScoringModel

NOTE = (
    "the model was scored as it was in memory: its weights are hashed, its shape was not compared with a"
    " config.json, and what torchtune computes differently was not corrected"
)
# A few tokens are scored in two ways; by rounding alone the two differ by less.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
_TOLERANCE_HALF = 0.1
_PROBE_TOKENS = 16


def unwrap(model: nn.Module) -> nn.Module:
    """Return the decoder inside DistributedDataParallel.

    Raises:
        ValueError: if it is no torchtune decoder, holds key-value caches, or is split in a way that would
            have ranks score different windows in one forward.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    try:
        scorable(inner)
    except ValueError as error:
        raise ValueError(
            f"the model: {error}, be it under FSDP2 or DistributedDataParallel. Evaluate others from a"
            " checkpoint, by a config"
        ) from error
    if getattr(inner, "caches_are_setup", bool)():
        raise ValueError("the model has key-value caches; delete_kv_caches() and evaluate then")
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() != _world_size():
            raise ValueError(
                f"{name} is divided over {parameter.device_mesh.size()} of {_world_size()} processes; a model"
                " in memory can be whole everywhere, or divided by FSDP over all processes"
            )
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise ValueError(
                f"{name} is divided along {parameter.device_mesh.ndim} axes (HSDP or tensor parallelism); a"
                " model in memory can be whole everywhere, or divided by FSDP over all processes"
            )
    return inner


def is_sharded(decoder: nn.Module) -> bool:
    """Return whether processes share the forward of this model."""
    return any(isinstance(module, FSDPModule) for module in decoder.modules())


def is_compiled(decoder: nn.Module) -> bool:
    """Return whether a part of the model was given to torch.compile."""
    return any(module._compiled_call_impl is not None for module in decoder.modules())


def hash_weights(decoder: nn.Module) -> WeightsHash:
    """Return the hash that a checkpoint of these weights has; all ranks of a divided model take part."""
    weights = WeightsHash()
    for name, parameter in decoder.named_parameters():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        with weights.reading(name, tensor.detach()):
            pass
    weights.close()
    return weights


@torch.no_grad()
def own_nll(decoder: nn.Module, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return a few tokens, their labels, and the NLL (float64) of what the model's own forward says of them:
    before anything in it is replaced."""
    vocab_size = scorable(decoder).vocab_size
    tokens_BT = (torch.arange(_PROBE_TOKENS, device=device)[None] * 7919 + 1) % vocab_size
    labels_BT = torch.roll(tokens_BT, -1, 1)
    labels_BT[:, -1] = CROSS_ENTROPY_IGNORE_IDX
    logits = decoder(tokens_BT)
    logits_BTV = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
    nll_N = F.cross_entropy(logits_BTV[0, :-1].double(), labels_BT[0, :-1], reduction="none")
    return tokens_BT, labels_BT, nll_N


@torch.no_grad()
def check_agreement(scorer: ScoringModel, probe: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Hold the scorer against the model's own forward.

    Raises:
        ValueError: if they say different things of the same tokens.
    """
    tokens_BT, labels_BT, nll_N = probe
    found_N = scorer(tokens_BT, labels_BT)[0].double()
    limit = _TOLERANCE.get(dtype, _TOLERANCE_HALF)
    difference = float(((found_N - nll_N).abs() / (1 + nll_N.abs())).max())
    if not difference <= limit:
        raise ValueError(
            f"this model's own forward and the scorer differ by {difference:.3g} (relative; {limit:g} is"
            " rounding): its forward does something after its last layer that the scorer does not know of;"
            " save it, and evaluate the checkpoint by a config"
        )


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
