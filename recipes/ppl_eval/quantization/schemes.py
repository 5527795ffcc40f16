"""The ways to quantise a linear layer: the name in a config, the layers it fits, and what it does.

torchao does the work. torchtune's quantiser classes name two of them; they are not called, because they
change settings of the whole process on the way (torch's float32 precision among them) and because the int4
one can only pack for CUDA.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.dtypes import Int4CPULayout, TensorCoreTiledLayout
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from ppl_eval.checkpoints.lazy_state_dict import short_dtype

GROUP_SIZES = (32, 64, 128, 256)
# The CPU's int4 kernel packs this many output rows together.
INT4_CPU_ROWS = 16
# torchao leaves narrower layers alone: quantising their activations gains nothing.
INT8_MIN_COLUMNS = 17
PROBE_SHAPE = (64, 256)


class Scheme(NamedTuple):
    """One way to quantise linear layers.

    Attributes:
        name: for people.
        mode: torchtune's short name, for file names.
        config: torchao's description of what is done to a weight.
        misfit: why the scheme does not fit a layer, or None.
    """

    name: str
    mode: str
    config: AOBaseConfig
    misfit: Callable[[nn.Linear], str | None]

    def apply(self, linear: nn.Linear) -> None:
        """Replace the layer's weight; the full-precision one is freed when nothing else holds it."""
        quantize_(linear, self.config)


def scheme_of(cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Scheme:
    """Return the scheme that a ``quantizer`` section names, tried out on the device.

    Raises:
        ValueError: for an unknown quantiser, key or group size, a quantiser for training, or a scheme that
            the device cannot run.
    """
    component = str(cfg.get("_component_", ""))
    package, name = component.partition(".")[0], component.rpartition(".")[2]
    if "QAT" in name:
        right = name.replace("QATQuantizer", "Quantizer").removesuffix("ModuleSwap")
        raise ValueError(
            f"{name} prepares a model for training. A checkpoint trained with it is evaluated with "
            f"quantizer._component_="
            f"torchtune.training.quantization.{right} and the groupsize of its training"
        )
    make = SCHEMES.get((package, name))
    if make is None:
        allowed = ", ".join(f"{PLACES[package]}.{name}" for package, name in SCHEMES)
        raise ValueError(
            f"quantizer._component_ is {component!r}; it can be {allowed}, ppl_eval.quantization.awq"
        )
    arguments = {str(key): value for key, value in cfg.items() if key != "_component_"}
    if package == "torchao" and "group_size" in arguments:  # its spelling of torchtune's groupsize
        arguments["groupsize"] = arguments.pop("group_size")
    known = [name for name in inspect.signature(make).parameters if name not in ("device", "dtype")]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"quantizer has unknown keys {unknown}; {name} takes {', '.join(known) or 'none'}")
    scheme = make(device=device, dtype=dtype, **arguments)
    _try_out(scheme, device, dtype)
    return scheme


def int4_weight_only(
    *,
    device: torch.device,
    dtype: torch.dtype,
    groupsize: int = 128,
    inner_k_tiles: int = 8,
    use_hqq: bool = False,
) -> Scheme:
    """Make int4 weights with a scale and a zero point per group: tinygemm on CUDA, else the CPU's kernel.

    ``use_hqq`` looks for better zero points by half-quadratic optimisation; it needs no data.
    """
    _check_group_size(groupsize)
    on_cpu = device.type == "cpu"
    if not on_cpu and dtype != torch.bfloat16:
        raise ValueError(
            f"the int4 kernel of {device.type} works in bf16: set dtype=bf16 (it is {short_dtype(dtype)})"
        )
    layout = Int4CPULayout() if on_cpu else TensorCoreTiledLayout(inner_k_tiles)

    def misfit(linear: nn.Linear) -> str | None:
        if on_cpu and linear.out_features % INT4_CPU_ROWS:
            return f"out_features {linear.out_features} is no multiple of {INT4_CPU_ROWS} (CPU int4 kernel)"
        return _group_misfit(linear, groupsize)

    config = Int4WeightOnlyConfig(
        group_size=groupsize, layout=layout, use_hqq=use_hqq, set_inductor_config=False
    )
    return Scheme(
        f"int4 weight-only, group size {groupsize}{', HQQ' if use_hqq else ''}", "4w", config, misfit
    )


def int8_dynamic_int4_weight(*, device: torch.device, dtype: torch.dtype, groupsize: int = 256) -> Scheme:
    """Make int8 activations, scaled per token as they come, and symmetric int4 weights per group."""
    _check_group_size(groupsize)
    config = Int8DynamicActivationInt4WeightConfig(group_size=groupsize, set_inductor_config=False)
    name = f"int8 dynamic activation, int4 weight, group size {groupsize}"
    return Scheme(name, "8da4w", config, partial(_group_misfit, groupsize=groupsize))


def int8_weight_only(*, device: torch.device, dtype: torch.dtype) -> Scheme:
    """Make int8 weights, one scale per output row."""
    return Scheme("int8 weight-only", "8w", Int8WeightOnlyConfig(set_inductor_config=False), lambda _: None)


def int8_dynamic_int8_weight(*, device: torch.device, dtype: torch.dtype) -> Scheme:
    """Make int8 activations, scaled per token as they come, and int8 weights, one scale per output row."""

    def misfit(linear: nn.Linear) -> str | None:
        if linear.in_features < INT8_MIN_COLUMNS:
            return f"in_features {linear.in_features} is below {INT8_MIN_COLUMNS}"
        return None

    config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    return Scheme("int8 dynamic activation, int8 weight", "8da8w", config, misfit)


def float8_weight_only(*, device: torch.device, dtype: torch.dtype) -> Scheme:
    """Make float8 (e4m3) weights, one scale per output row."""
    return Scheme(
        "float8 weight-only", "f8w", Float8WeightOnlyConfig(set_inductor_config=False), lambda _: None
    )


def _check_group_size(groupsize: Any) -> None:
    if groupsize not in GROUP_SIZES:
        raise ValueError(
            f"the quantizer's group size is {groupsize!r}; it can be {', '.join(map(str, GROUP_SIZES))}"
        )


def _group_misfit(linear: nn.Linear, groupsize: int) -> str | None:
    if linear.in_features % groupsize:
        return f"in_features {linear.in_features} is no multiple of group size {groupsize}"
    return None


def _try_out(scheme: Scheme, device: torch.device, dtype: torch.dtype) -> None:
    """Quantise a small layer and run it, so that a missing kernel shows before the weights are changed.

    Raises:
        ValueError: if it fails, with the message of the failure.
    """
    rows, columns = PROBE_SHAPE
    linear = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype).requires_grad_(False)
    try:
        scheme.apply(linear)
        linear(torch.ones(1, columns, device=device, dtype=dtype))
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, TypeError) as e:
        said = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise ValueError(
            f"quantizer {scheme.name} does not work on {device.type} in {short_dtype(dtype)}: {said}"
        ) from e


# (package, last part of `_component_`) -> factory. torchtune's two classes, and torchao's configs for the
# rest.
SCHEMES: dict[tuple[str, str], Callable[..., Scheme]] = {
    ("torchtune", "Int4WeightOnlyQuantizer"): int4_weight_only,
    ("torchtune", "Int8DynActInt4WeightQuantizer"): int8_dynamic_int4_weight,
    ("torchao", "Int4WeightOnlyConfig"): int4_weight_only,
    ("torchao", "Int8DynamicActivationInt4WeightConfig"): int8_dynamic_int4_weight,
    ("torchao", "Int8WeightOnlyConfig"): int8_weight_only,
    ("torchao", "Int8DynamicActivationInt8WeightConfig"): int8_dynamic_int8_weight,
    ("torchao", "Float8WeightOnlyConfig"): float8_weight_only,
}
PLACES = {"torchtune": "torchtune.training.quantization", "torchao": "torchao.quantization"}
