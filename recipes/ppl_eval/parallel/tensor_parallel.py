"""Tensor parallelism: every rank keeps some heads, some of the MLP and some of the vocabulary; logits are
never gathered.

Parameters are cut down to this rank's part and stay plain tensors, so FSDP, loading and compilation see an
ordinary smaller model. Two sums over the ``tp`` ranks per layer put the parts together (after the attention's
output projection and after the MLP), one after the embedding, and two small ones per chunk of the head.
"""

import math
from collections.abc import Mapping
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtune.modules import TransformerDecoder
from torchtune.training import prepare_mha_for_tp

from ppl_eval.models import cpu_linear
from ppl_eval.parallel.fsdp import Slice
from ppl_eval.parallel.parallel_dims import CONFIG_KEYS

# Columns of q, k, v, gate and up are split; output projections and down take split inputs and give parts of a
# sum.
_SPLIT_OUTPUTS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
_SPLIT_INPUTS = ("attn.output_proj", "mlp.w2")


def split_model(decoder: TransformerDecoder, group: dist.ProcessGroup) -> dict[str, Slice]:
    """Cut a decoder down to this rank's part and make its forward sum over the group.

    Before loading: call it on a model on the meta device, and give the result to ``load_parameters``.

    Args:
        decoder: any of torchtune's text decoders, tied or not.
        group: the ``tp`` ranks.

    Returns:
        The slice that is kept of every split parameter, by name.

    Raises:
        ValueError: if heads, key-value heads or the MLP do not divide, or a layer is not a plain linear layer
            (quantised, LoRA).
    """
    tp, rank = group.size(), group.rank()
    check_divides(decoder, tp)
    slices: dict[str, Slice] = {}
    for index, layer in enumerate(decoder.layers):
        for path in chain(_SPLIT_OUTPUTS, _SPLIT_INPUTS):
            if path == "mlp.w3" and layer.mlp.w3 is None:
                continue  # An MLP without a gate.
            linear = _linear(layer, path, f"layers.{index}.{path}")
            dim = 0 if path in _SPLIT_OUTPUTS else 1
            slices |= _keep_part(linear, f"layers.{index}.{path}", dim, tp, rank)
            if dim == 1:
                linear.forward = partial(_summed_linear, linear, group)  # type: ignore[method-assign]
        layer.attn.num_heads //= tp
        layer.attn.num_kv_heads //= tp
    embedding = decoder.tok_embeddings
    kept = _keep_part(embedding, "tok_embeddings", 0, tp, rank)
    embedding.forward = partial(_summed_embedding, embedding, kept["tok_embeddings.weight"].start, group)
    slices |= kept
    if isinstance(decoder.output, nn.Module):
        slices |= _keep_part(_linear(decoder, "output", "output"), "output", 0, tp, rank)
    return slices


def apply_plan(decoder: TransformerDecoder, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Apply a user's tensor-parallel plan, as torchtune's recipes do, instead of ``split_model``.

    Args:
        decoder: the decoder; on the meta device.
        mesh: one-dimensional mesh of the ``tp`` ranks.
        plan: ``tensor_parallel_plan``: module name patterns to parallel styles. Its head must give whole,
            replicated logits.

    Raises:
        ValueError: if heads do not divide, or the head is tied (its embedding would be a distributed tensor,
            its input a plain one).
    """
    check_divides(decoder, mesh.size())
    if not isinstance(decoder.output, nn.Module):
        raise ValueError(
            "tensor_parallel_plan cannot be used with a model whose head is tied to its embedding; leave "
            "tensor_parallel_plan out: the built-in plan splits tied heads too"
        )
    prepare_mha_for_tp(decoder, mesh)
    parallelize_module(decoder, mesh, dict(plan))


def check_divides(decoder: TransformerDecoder, tp: int) -> None:
    """Check that a decoder can be split ``tp`` ways. The vocabulary need not divide.

    Raises:
        ValueError: if heads, key-value heads or the width of an MLP do not divide; lists the degrees that
            would do.
    """
    sizes: dict[str, set[int]] = {"heads": set(), "key-value heads": set(), "MLP width": set()}
    for layer in decoder.layers:
        sizes["heads"].add(layer.attn.num_heads)
        sizes["key-value heads"].add(layer.attn.num_kv_heads)
        sizes["MLP width"].add(layer.mlp.w1.out_features)
    common = math.gcd(*chain.from_iterable(sizes.values()))
    if common % tp:
        shown = ", ".join(f"{' and '.join(map(str, sorted(found)))} {what}" for what, found in sizes.items())
        valid = ", ".join(str(degree) for degree in range(1, common + 1) if common % degree == 0)
        raise ValueError(
            f"{CONFIG_KEYS['tp']} is {tp}, which does not divide this model ({shown}); valid degrees: {valid}"
        )


def bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return start and stop of one of ``parts`` runs of ``size`` entries whose lengths differ by one at
    most.
    """
    return size * part // parts, size * (part + 1) // parts


def _keep_part(module: nn.Module, name: str, dim: int, tp: int, rank: int) -> dict[str, Slice]:
    slices = {}
    for key, parameter in list(module.named_parameters(recurse=False)):
        if dim >= parameter.dim():
            # The bias of a layer with split inputs: whole on every rank, added once after the sum.
            continue
        size = parameter.shape[dim]
        start, stop = bounds(size, tp, rank)
        part = parameter.detach().narrow(dim, start, stop - start).clone()
        setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
        slices[f"{name}.{key}"] = Slice(dim, start, stop, size)
    return slices


def _linear(parent: nn.Module, path: str, name: str) -> nn.Linear:
    module = parent.get_submodule(path)
    plain = type(module) in (nn.Linear, cpu_linear.OneDNNLinear)
    if not plain or not isinstance(module, nn.Linear) or type(module.weight.data) is not torch.Tensor:
        kind = type(module.weight.data).__name__ if plain else type(module).__name__
        raise ValueError(
            f"{name} is a {kind}, and only plain linear layers can be split: quantised weights cannot. Set "
            f"{CONFIG_KEYS['tp']}: 1 and give every process a copy ({CONFIG_KEYS['dp_replicate']}: -1)"
        )
    return module


def _summed_linear(linear: nn.Linear, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    out = cpu_linear.linear(x, linear.weight)
    dist.all_reduce(out, group=group)
    return out if linear.bias is None else out + linear.bias


def _summed_embedding(
    embedding: nn.Embedding, start: int, group: dist.ProcessGroup, tokens_BT: torch.Tensor
) -> torch.Tensor:
    row_BT = tokens_BT - start
    elsewhere_BT = (row_BT < 0) | (row_BT >= embedding.weight.shape[0])
    # The class's own forward, because Gemma's scales what it looks up.
    hidden_BTD = type(embedding).forward(embedding, row_BT.masked_fill(elsewhere_BT, 0))
    hidden_BTD = hidden_BTD.masked_fill_(elsewhere_BT[..., None], 0.0)
    dist.all_reduce(hidden_BTD, group=group)
    return hidden_BTD
