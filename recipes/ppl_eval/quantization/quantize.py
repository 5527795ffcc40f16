"""Post-training quantisation on load, layer by layer, with an account of what was done to which layer.

torchao leaves a layer that its scheme does not fit in full precision without a word. Here each linear layer
is examined first: quantised, or skipped for a reason that the result shows.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from ppl_eval.checkpoints.lazy_state_dict import short_dtype
from ppl_eval.checkpoints.quantized_tensors import is_quantized, plain_tensors, stored_bytes
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.engines import scorable
from ppl_eval.quantization.awq import COMPONENT as AWQ
from ppl_eval.quantization.awq import awq_layers, run_alone
from ppl_eval.quantization.schemes import Scheme, scheme_of


@dataclass
class QuantizationReport:
    """What quantisation did.

    Attributes:
        scheme: name of the scheme.
        mode: torchtune's short name of the scheme, for file names.
        quantized: (layer, scheme) in the model's order.
        skipped: (layer, reason) in the model's order.
        weight_bytes: bytes of all weights afterwards.
        digest: sha256 over the quantised weights of a calibrated run, which all ranks must share; else None.
        notes: lines for result["notes"].
    """

    scheme: str = ""
    mode: str = ""
    quantized: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    weight_bytes: int = 0
    digest: str | None = None
    notes: list[str] = field(default_factory=list)


class Packing:
    """Quantises weights one by one while they are read, so that no more than one of them is there in full
    precision: the peak is the quantised model and a weight.

    Args:
        decoder: on the meta device.
        quantizer_cfg: the ``quantizer`` section, of a scheme that is not calibrated.
        device: where the weights go; the packed layout depends on it.
        dtype: of the weights.

    Raises:
        ValueError: for an unknown quantiser or key, a scheme that the device cannot run, or no layer that
            fits.
    """

    def __init__(
        self, decoder: Decoder, quantizer_cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._decoder, self._dtype, self._report = decoder, dtype, QuantizationReport()
        self._scheme = scheme_of(quantizer_cfg, device, dtype)
        fitting = _sort_layers(decoder, self._scheme, self._report, leave_head=False)
        self._names = {f"{name}.weight" for name in fitting}

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight of this name, quantised if its layer is to be."""
        if name not in self._names:
            return weight
        num_outputs, num_inputs = weight.shape
        linear = nn.Linear(num_inputs, num_outputs, bias=False, device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        self._scheme.apply(linear)
        return linear.weight.data

    def report(self) -> QuantizationReport:
        """Return what was done, once the model holds its weights."""
        model = self._decoder.module
        left = [name for name in self._names if not is_quantized(model.get_parameter(name))]
        assert not left, f"torchao left {left} in full precision"
        _describe(model, self._scheme, self._report, self._dtype)
        return self._report


def is_calibrated(quantizer_cfg: Mapping[str, Any]) -> bool:
    """Return whether a ``quantizer`` section looks at activations, for which it needs the whole model."""
    return str(quantizer_cfg.get("_component_")) == AWQ


def refuse_quantized() -> NoReturn:
    """Refuse to quantise what is quantised."""
    raise ValueError(
        "the checkpoint is quantised already: remove `quantizer` from the config, or take the original"
    )


def quantize(
    decoder: Decoder | nn.Module,
    quantizer_cfg: Mapping[str, Any],
    device: torch.device | str,
    *,
    batches: Iterable[torch.Tensor] | None = None,
    share: Callable[[int, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor] = run_alone,
) -> QuantizationReport:
    """Quantise the linear layers of a loaded model in place.

    The full-precision weight of a layer is dropped before the next one is touched: the peak is the model
    plus a layer.

    Args:
        decoder: with its weights on ``device``.
        quantizer_cfg: the ``quantizer`` section, for example
            {_component_: torchtune.training.quantization.Int4WeightOnlyQuantizer, groupsize: 128}.
        device: where the model runs; the packed layout depends on it.
        batches: tokens_BT to calibrate with, for a quantiser that does.
        share: how the ranks divide the work of calibration (see ``awq.awq_layers``).

    Raises:
        ValueError: for an unknown quantiser or key, a scheme that the device cannot run, weights that are
            quantised already, or no layer that fits.
    """
    device, decoder = torch.device(device), scorable(decoder)
    model = decoder.module
    if any(is_quantized(p) for p in model.parameters()):
        refuse_quantized()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    calibrated = is_calibrated(quantizer_cfg)
    report = QuantizationReport()
    if calibrated:
        base = {"_component_": "torchtune.training.quantization.Int4WeightOnlyQuantizer"}
        base |= {"groupsize": quantizer_cfg.get("groupsize", 128)}
        scheme = scheme_of(base, device, dtype)
        scheme = scheme._replace(name=f"AWQ on {scheme.name}", mode=f"{scheme.mode}-awq")
        if batches is None:
            raise ValueError(
                "quantizer.calibration is missing: AWQ looks at activations, so it needs "
                "{dataset, num_windows}"
            )
        steps = int(quantizer_cfg.get("num_steps", 20))
        fitting = _sort_layers(decoder, scheme, report, leave_head=True)
        report.notes += awq_layers(
            decoder, set(fitting), scheme, batches, num_steps=steps, device=device, share=share
        )
    else:
        scheme = scheme_of(quantizer_cfg, device, dtype)
        fitting = _sort_layers(decoder, scheme, report, leave_head=False)
        for name in fitting:
            scheme.apply(model.get_submodule(name))  # type: ignore[arg-type]
    left = [name for name in fitting if not is_quantized(model.get_submodule(name).weight)]  # type: ignore[arg-type]
    assert not left, f"torchao left {left} in full precision"
    _describe(model, scheme, report, dtype)
    if calibrated:
        report.digest = digest(model)
    return report


def _sort_layers(
    decoder: Decoder, scheme: Scheme, report: QuantizationReport, *, leave_head: bool
) -> list[str]:
    """Return the layers that the scheme fits; the report says why the others are skipped.

    Raises:
        ValueError: if it fits none.
    """
    for name, module in decoder.module.named_modules():
        if not isinstance(module, nn.Linear):
            report.skipped += _other_matrices(name, module)
            continue
        reason = (
            "the head stays in full precision under AWQ"
            if leave_head and name == decoder.head_name
            else scheme.misfit(module)
        )
        if reason is None:
            report.quantized.append((name, scheme.name))
        else:
            report.skipped.append((name, reason))
    if decoder.is_tied:
        report.skipped.append((decoder.head_name, "tied to the embedding, which stays in full precision"))
    if not report.quantized:
        reasons = "; ".join(f"{num} layers: {reason}" for reason, num in _count_reasons(report).items())
        raise ValueError(
            f"quantizer {scheme.name} fits no layer ({reasons or 'the model has no linear layer'})"
        )
    return [name for name, _ in report.quantized]


def _other_matrices(name: str, module: nn.Module) -> list[tuple[str, str]]:
    """Return the matrices of a module that is no linear layer, such as experts that are joined to one tensor:
    left out of the count, they would look quantised. Embeddings are known to stay."""
    if isinstance(module, nn.Embedding):
        return []
    reason = "a matrix that is no linear layer (joined experts, convolutions)"
    return [(f"{name}.{key}", reason) for key, own in module.named_parameters(recurse=False) if own.dim() > 1]


def _describe(model: nn.Module, scheme: Scheme, report: QuantizationReport, dtype: torch.dtype) -> None:
    report.scheme, report.mode = scheme.name, scheme.mode
    report.weight_bytes = stored_bytes(model)
    report.notes.append(
        f"{scheme.name}: {len(report.quantized)} linear layers quantised, {len(report.skipped)} left in "
        f"{short_dtype(dtype)}; weights take {report.weight_bytes / 2**20:.1f} MiB"
    )
    report.notes += [
        f"not quantised, {reason}: {num} layers" for reason, num in _count_reasons(report).items()
    ]


def _count_reasons(report: QuantizationReport) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, reason in report.skipped:
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def digest(model: nn.Module) -> str:
    """Hash (sha256) the bytes of all quantised weights, by name."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if is_quantized(parameter):
            sha.update(name.encode())
            for part in plain_tensors(parameter):
                sha.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
