"""AWQ: scale the input columns of a weight before it is rounded, so that those that matter are rounded less.

Activations on calibration text show which columns matter. For each layer the exponent of the scale is
searched that changes the layer's output least (Lin et al., 2023, "AWQ: Activation-aware Weight
Quantization", section 3.2); scoring one candidate is torchao's work. torchao's own flow keeps the inputs of
every layer of the model until the end; here one decoder layer is observed, searched and quantised at a time,
on the outputs of the full-precision layers before it, which gives the same scales in the memory of one layer.

Chosen among what torch 2.13 and torchao 0.13 offer on CPU: torchao's GPTQ does not run torchtune's decoders,
SmoothQuant helps int8 activations only, HQQ uses no data. See docs/quantization.md for what each gains.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torchao.prototype.awq.core import AWQObserver
from torchao.quantization.linear_activation_scale import (
    to_weight_tensor_with_linear_activation_scale_metadata,
)

from ppl_eval.models.decoder import Decoder
from ppl_eval.quantization.schemes import Scheme

COMPONENT = "ppl_eval.quantization.awq"
Share = Callable[[int, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]


def awq(calibration: Mapping[str, Any], groupsize: int = 128, num_steps: int = 20) -> Mapping[str, Any]:
    """Return the ``quantizer`` section of AWQ on int4 weights; its arguments are the keys that are checked.

    Args:
        calibration: {dataset, num_windows}: text that is not the text to be scored, and how many windows of
            it to look at.
        groupsize: weights that share a scale and a zero point.
        num_steps: exponents tried per layer.
    """
    return {"calibration": calibration, "groupsize": groupsize, "num_steps": num_steps}


def run_alone(index: int, like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Divide the searches of a run of one process: compute each here."""
    return compute()


def awq_layers(
    decoder: Decoder,
    names: set[str],
    scheme: Scheme,
    batches: Iterable[torch.Tensor],
    *,
    num_steps: int,
    device: torch.device,
    share: Share = run_alone,
) -> list[str]:
    """Calibrate and quantise the named linear layers of a decoder in place.

    Every rank runs the same text through the same layers. The searches, which take nearly all the time, are
    divided: search number i is computed by one rank and ``share(i, like, compute)`` gives its result to all,
    so that the weights are the same bits everywhere whatever hardware the ranks run on.

    Args:
        decoder: with full-precision weights on ``device``.
        names: linear layers to quantise, inside decoder layers.
        scheme: how the scaled weights are quantised.
        batches: tokens_BT, int64.
        num_steps: exponents tried.
        device: where the decoder is.
        share: (index of the search, a tensor of the result's shape and dtype, the search) -> the result.

    Returns:
        Notes.

    Raises:
        ValueError: if there is no calibration text.
    """
    calls = _first_layer_calls(decoder, batches, device)
    if not calls:
        raise ValueError("the calibration text gives not one window: see quantizer.calibration")
    layers = decoder.layers
    num_tokens = sum(args[0].shape[0] * args[0].shape[1] for args, _ in calls)
    index = 0
    for i, layer in enumerate(layers):
        linears = {
            name: module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and f"{decoder.layers_name}.{i}.{name}" in names
        }
        inputs, calls = _observe(layer, linears, calls)
        for name, linear in linears.items():
            _quantize_scaled(linear, inputs.pop(name), scheme, num_steps, partial(share, index))
            index += 1
    return [
        f"{scheme.name}: {index} layers calibrated on {num_tokens} tokens, {num_steps} exponents tried for "
        f"each"
    ]


class _Reached(Exception):
    """The first decoder layer was reached; what comes after it need not run."""


Call = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def _first_layer_calls(decoder: Decoder, batches: Iterable[torch.Tensor], device: torch.device) -> list[Call]:
    """Record what the decoder calls its first layer with, batch by batch: embedded tokens, mask,
    positions.
    """
    calls: list[Call] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Reached

    hook = decoder.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for tokens_BT in batches:
            try:
                decoder.hidden(tokens_BT.to(device), None, tokens_BT.shape[1])
            except _Reached:
                continue
    finally:
        hook.remove()
    return calls


@torch.no_grad()
def _observe(
    layer: nn.Module, linears: Mapping[str, nn.Linear], calls: list[Call]
) -> tuple[dict[str, list[torch.Tensor]], list[Call]]:
    """Run a layer in full precision: the inputs of its linears as rows, and the calls of the next layer."""
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in linears}

    def recorder(name: str) -> Callable[..., None]:
        return lambda _, args: inputs[name].append(args[0].flatten(0, -2))

    hooks = [linear.register_forward_pre_hook(recorder(name)) for name, linear in linears.items()]
    try:
        following: list[Call] = [((layer(*args, **kwargs), *args[1:]), kwargs) for args, kwargs in calls]
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, following


@torch.no_grad()
def _quantize_scaled(
    linear: nn.Linear,
    inputs: list[torch.Tensor],
    scheme: Scheme,
    num_steps: int,
    share: Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor],
) -> None:
    """Search a layer's scale, share it with all ranks, and quantise the scaled weight with it."""

    def search() -> torch.Tensor:
        observer = AWQObserver(linear.weight, linear.bias, scheme.config, num_steps)
        observer.inputs = [torch.cat(inputs)]
        return observer.calculate_qparams()

    scale_D = share(linear.weight[0], search)
    linear.weight = nn.Parameter(linear.weight * scale_D, requires_grad=False)
    scheme.apply(linear)
    scaled = to_weight_tensor_with_linear_activation_scale_metadata(linear.weight.data, scale_D)
    linear.weight = nn.Parameter(scaled, requires_grad=False)
