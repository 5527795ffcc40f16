"""Post-training quantisation on load, layer by layer, with an account of what was done to which layer.

torchao leaves a layer that its scheme does not fit in full precision without a word, and torchtune's int4
quantiser only works on CUDA. Here each linear layer is looked at first: quantised, or skipped for a reason
that the result shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torchao.dtypes import Int4CPULayout
from torchao.quantization import Int4WeightOnlyConfig, quantize_
from torchtune.training.quantization import Int4WeightOnlyQuantizer

from ppl_eval.weights import is_quantized, is_tied, short_dtype

# The CPU kernel packs this many output rows together.
INT4_CPU_ROWS = 16


@dataclass
class QuantizationReport:
    """What quantisation did.

    Attributes:
        quantized: (layer, scheme) in the model's order.
        skipped: (layer, reason) in the model's order.
        notes: lines for result["notes"].
    """

    quantized: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Scheme(NamedTuple):
    """One way to quantise a linear layer: its name, why it does not fit a layer (or None), and the deed."""

    name: str
    misfit: Callable[[nn.Linear], str | None]
    apply: Callable[[nn.Linear], None]


def quantize(
    model: nn.Module, quantizer_cfg: Mapping[str, Any], device: torch.device | str
) -> QuantizationReport:
    """Quantises the linear layers of a loaded model in place.

    The full-precision weight of a layer is dropped before the next layer is touched, so the peak is the
    model plus one layer.

    Args:
        model: with weights, on `device`.
        quantizer_cfg: the `quantizer` section, for example
            {_component_: torchtune.training.quantization.Int4WeightOnlyQuantizer, groupsize: 128}.
        device: where the model runs; the packed layout depends on it.

    Raises:
        ValueError: unknown quantiser or key, or no layer fits.
    """
    device = torch.device(device)
    scheme = _scheme(quantizer_cfg, device)
    report = QuantizationReport()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        reason = "already quantised" if is_quantized(module.weight) else scheme.misfit(module)
        if reason is None:
            scheme.apply(module)
            if not is_quantized(module.weight):
                reason = "torchao left it in full precision"
        if reason is None:
            report.quantized.append((name, scheme.name))
        else:
            report.skipped.append((name, reason))
    if is_tied(model):
        report.skipped.append(("output", "tied to the embedding, which stays in full precision"))
    if not report.quantized:
        reasons = "; ".join(f"{num} layers: {reason}" for reason, num in _count_reasons(report).items())
        raise ValueError(
            f"quantizer {scheme.name} quantised nothing ({reasons or 'the model has no linear layer'})"
        )
    weights = next(p.dtype for p in model.parameters() if not is_quantized(p) and p.is_floating_point())
    report.notes.append(
        f"{scheme.name}: {len(report.quantized)} linear layers quantised, {len(report.skipped)} left in "
        f"{short_dtype(weights)}"
    )
    report.notes += [
        f"not quantised, {reason}: {num} layers" for reason, num in _count_reasons(report).items()
    ]
    return report


def _count_reasons(report: QuantizationReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, reason in report.skipped:
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def _scheme(cfg: Mapping[str, Any], device: torch.device) -> Scheme:
    """The scheme that a `quantizer` section names, for the device."""
    component = str(cfg.get("_component_", ""))
    arguments = {str(k): v for k, v in cfg.items() if k != "_component_"}
    if component.rpartition(".")[2] != "Int4WeightOnlyQuantizer":
        raise ValueError(
            f"quantizer._component_ is {component!r}; it can be "
            "torchtune.training.quantization.Int4WeightOnlyQuantizer"
        )
    unknown = sorted(set(arguments) - {"groupsize", "inner_k_tiles"})
    if unknown:
        raise ValueError(f"quantizer has unknown keys {unknown}; known are groupsize, inner_k_tiles")
    return _int4_weight_only(device, **arguments)


def _int4_weight_only(device: torch.device, groupsize: int = 128, inner_k_tiles: int = 8) -> Scheme:
    """int4 weights, one scale and zero point per group: tinygemm on CUDA, the CPU's own packing elsewhere."""
    if groupsize not in (32, 64, 128, 256):
        raise ValueError(f"quantizer.groupsize is {groupsize}; the int4 kernels know 32, 64, 128 and 256")

    def misfit(linear: nn.Linear) -> str | None:
        if linear.in_features % groupsize:
            return f"in_features {linear.in_features} is no multiple of group size {groupsize}"
        if device.type == "cpu" and linear.out_features % INT4_CPU_ROWS:
            return f"out_features {linear.out_features} is no multiple of {INT4_CPU_ROWS} (CPU int4 kernel)"
        if device.type == "cuda" and linear.weight.dtype != torch.bfloat16:
            return (
                f"the CUDA int4 kernel needs dtype=bf16, the weights are {short_dtype(linear.weight.dtype)}"
            )
        return None

    def apply(linear: nn.Linear) -> None:
        if device.type == "cpu":
            # set_inductor_config would change global compiler settings; nothing here compiles.
            config = Int4WeightOnlyConfig(
                group_size=groupsize, layout=Int4CPULayout(), set_inductor_config=False
            )
            quantize_(linear, config)
        else:
            Int4WeightOnlyQuantizer(groupsize=groupsize, inner_k_tiles=inner_k_tiles).quantize(linear)

    return Scheme(f"int4 weight-only, group size {groupsize}", misfit, apply)
