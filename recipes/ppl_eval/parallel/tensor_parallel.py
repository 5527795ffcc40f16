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
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from ppl_eval.models import cpu_linear
from ppl_eval.models.decoder import Decoder
from ppl_eval.parallel.fsdp import Slice
from ppl_eval.parallel.parallel_dims import CONFIG_KEYS


def split_model(decoder: Decoder, group: dist.ProcessGroup) -> dict[str, Slice]:
    """Cut a decoder down to this rank's part and make its forward sum over the group.

    Before loading: call it on a model on the meta device, and give the result to ``load_parameters``.

    Args:
        decoder: tied or not.
        group: the ``tp`` ranks.

    Returns:
        The slice that is kept of every split parameter, by name.

    Raises:
        ValueError: if the model has no such layout, heads, key-value heads or the MLP do not divide, or a
            layer is not a plain linear layer (quantised, LoRA).
    """
    reason = decoder.supports("tp")
    if reason is not None:
        raise ValueError(reason)
    tp, rank = group.size(), group.rank()
    layout = decoder.tensor_parallel_layout()
    check_divides(layout.sizes, tp)
    slices: dict[str, Slice] = {}
    for dim, names, forward in (
        (0, layout.split_outputs, None),
        (0, layout.gathered_outputs, _gathered_linear),
        (1, layout.split_inputs, _summed_linear),
        (1, layout.sliced_inputs, _sliced_linear),
    ):
        for name in names:
            linear = _linear(decoder.module, name)
            slices |= _keep_part(linear, name, dim, tp, rank)
            if forward is not None:
                linear.forward = partial(forward, linear, group)  # type: ignore[method-assign]
    layout.shrink(tp)
    embedding, name = decoder.embed_unit(), decoder.embedding_name
    kept = _keep_part(embedding, name, 0, tp, rank)
    start = kept[f"{name}.weight"].start
    embedding.forward = partial(  # type: ignore[method-assign]
        _summed_embedding, embedding, start, group
    )
    slices |= kept
    if decoder.head_unit() is not None:
        slices |= _keep_part(_linear(decoder.module, decoder.head_name), decoder.head_name, 0, tp, rank)
    return slices


def apply_plan(decoder: Decoder, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Apply a user's tensor-parallel plan, as torchtune's recipes do, instead of ``split_model``.

    Args:
        decoder: the decoder; on the meta device.
        mesh: one-dimensional mesh of the ``tp`` ranks.
        plan: ``tensor_parallel_plan``: module name patterns to parallel styles. Its head must give whole,
            replicated logits.

    Raises:
        ValueError: if heads do not divide, or the model cannot be split by a plan.
    """
    reason = decoder.supports("tensor_parallel_plan")
    if reason is not None:
        raise ValueError(reason)
    check_divides(decoder.tensor_parallel_layout().sizes, mesh.size())
    decoder.apply_plan(mesh, plan)


def check_divides(sizes: Mapping[str, set[int]], tp: int) -> None:
    """Check that a decoder can be split ``tp`` ways. The vocabulary need not divide.

    Raises:
        ValueError: if heads, key-value heads or the width of an MLP do not divide; lists the degrees that
            would do.
    """
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


def _linear(decoder: nn.Module, name: str) -> nn.Linear:
    module = decoder.get_submodule(name)
    plain = type(module) in (nn.Linear, cpu_linear.OneDNNLinear)
    if not plain or not isinstance(module, nn.Linear) or type(module.weight.data) is not torch.Tensor:
        kind = type(module.weight.data).__name__ if plain else type(module).__name__
        raise ValueError(
            f"{name} is a {kind}, and only plain linear layers can be split: quantised weights cannot. Set "
            f"{CONFIG_KEYS['tp']}: 1 and give every process a copy ({CONFIG_KEYS['dp_replicate']}: -1)"
        )
    return module


def _summed_linear(linear: nn.Linear, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    # Where a compiler or another processor is in charge, the layer is torch's own.
    multiply = cpu_linear.linear if isinstance(linear, cpu_linear.OneDNNLinear) else F.linear
    out = multiply(x, linear.weight)
    dist.all_reduce(out, group=group)
    return out if linear.bias is None else out + linear.bias


def _sliced_linear(linear: nn.Linear, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    start, stop = bounds(x.shape[-1], group.size(), group.rank())
    return _summed_linear(linear, group, x[..., start:stop])


def _gathered_linear(linear: nn.Linear, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    out = cpu_linear.linear(x, linear.weight, linear.bias)
    parts = [torch.empty_like(out) for _ in range(group.size())]
    dist.all_gather(parts, out.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


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
