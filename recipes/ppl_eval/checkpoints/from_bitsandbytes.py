"""bitsandbytes' files: NF4 and FP4 with a scale for 64 values, the scales perhaps quantised once more; and
LLM.int8().

A four-bit weight is a row of bytes, two values each, the higher four bits first. Everything that describes it
stands beside it: ``absmax``, ``quant_map`` and a JSON text in ``quant_state.bitsandbytes__nf4``. Its kernels
have the sixteen values built in, so a ``quant_map`` with others is refused.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ppl_eval.checkpoints.packed_values import PackedWeight, Stored, check_dtype, check_shape, layers_with
from ppl_eval.config.files import parse_json_object

STATE = "weight.quant_state.bitsandbytes__"
# The sixteen values of QLoRA's NF4 (quantiles of a normal distribution), and of FP4 divided by 12.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
_FP4 = (*(0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0), *(-0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0))
VALUES = {
    "nf4": torch.tensor(_NF4, dtype=torch.float32),
    "fp4": torch.tensor(_FP4, dtype=torch.float32) / 12,
}
INT8_RANGE = 127


def activations(config: dict[str, Any]) -> str | None:
    """Return what the model does to activations."""
    if config.get("load_in_8bit"):
        return "LLM.int8() rounds activations to int8, except columns with outliers"
    return None


def find(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the quantised weights of a checkpoint.

    Args:
        stored: all its tensors.
        config: ``quantization_config``.

    Raises:
        ValueError: for a form that is not known here, or tensors that contradict each other.
    """
    found = [
        _four_bits(stored, layer, kind) for kind in VALUES for layer in layers_with(stored, STATE + kind)
    ]
    return found + [_int8(stored, layer) for layer in layers_with(stored, "SCB")]


def _four_bits(stored: Stored, layer: str, kind: str) -> PackedWeight:
    weight, state_name = f"{layer}.weight", f"{layer}.{STATE}{kind}"
    try:
        state = parse_json_object(bytes(stored[state_name].read().numpy()))
        rows, columns = (int(n) for n in state["shape"])
        block, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{state_name} does not describe a weight ({type(e).__name__}: {e})") from e
    if state.get("quant_type") != kind or min(rows, columns, block) <= 0 or nested < 0:
        raise ValueError(f"{state_name} does not describe a weight of kind {kind}: {state}")
    numel = rows * columns
    num_blocks = -(-numel // block)
    check_shape(stored, weight, (-(-numel // 2), 1), (1, -(-numel // 2)))
    check_dtype(stored, weight, torch.uint8)
    check_shape(stored, f"{weight}.absmax", (num_blocks,))
    check_shape(stored, f"{weight}.quant_map", (16,))
    parts = [weight, state_name, f"{weight}.absmax", f"{weight}.quant_map"]
    scheme = f"{kind.upper()}, blocks of {block}"
    if nested:
        check_dtype(stored, f"{weight}.absmax", torch.uint8)
        check_shape(stored, f"{weight}.nested_absmax", (-(-num_blocks // nested),))
        check_shape(stored, f"{weight}.nested_quant_map", (256,))
        parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        scheme += f", scales in 8 bits by blocks of {nested}"
    else:
        check_dtype(stored, f"{weight}.absmax", torch.float32)
    sizes = {"block": block, "nested": nested, "rows": rows, "columns": columns}
    read = partial(_dequantize, stored, weight, VALUES[kind], sizes, offset)
    return PackedWeight(weight, tuple(parts), (rows, columns), scheme, read)


def _dequantize(
    stored: Stored, weight: str, values: torch.Tensor, sizes: Mapping[str, int], offset: float
) -> torch.Tensor:
    table = stored[f"{weight}.quant_map"].read().float()
    if not torch.allclose(table, values, rtol=0, atol=1e-6):
        raise ValueError(f"{weight}.quant_map has other values than bitsandbytes' kernels compute with")
    absmax = stored[f"{weight}.absmax"].read()
    if sizes["nested"]:
        map_of_scales = stored[f"{weight}.nested_quant_map"].read().float()
        of_blocks = stored[f"{weight}.nested_absmax"].read().float().repeat_interleave(sizes["nested"])
        absmax = map_of_scales[absmax.int()] * of_blocks[: len(absmax)] + offset
    packed = stored[weight].read().flatten()
    numel = sizes["rows"] * sizes["columns"]
    flat = torch.empty(numel, dtype=torch.float32)
    # Whole blocks at a time, so that codes and scales of a few are held.
    step = sizes["block"] * 2 * max(1, (1 << 21) // sizes["block"])
    for first in range(0, numel, step):
        last = min(first + step, numel)
        own = packed[first // 2 : -(-last // 2)]
        codes = torch.stack((own >> 4, own & 0xF), dim=-1).flatten()[: last - first]
        scales = absmax[first // sizes["block"] : -(-last // sizes["block"])]
        flat[first:last] = values[codes.int()] * scales.repeat_interleave(sizes["block"])[: last - first]
    return flat.view(sizes["rows"], sizes["columns"])


def _int8(stored: Stored, layer: str) -> PackedWeight:
    weight, scale = f"{layer}.weight", f"{layer}.SCB"
    if weight not in stored or stored[weight].meta.dim() != 2:
        raise ValueError(f"the checkpoint has {scale} and no matrix {weight}")
    rows, columns = stored[weight].meta.shape
    check_dtype(stored, weight, torch.int8)
    check_shape(stored, scale, (rows,))
    parts = [weight, scale]
    form = f"{layer}.weight_format"
    if form in stored:
        parts.append(form)
        if int(stored[form].read().flatten()[0]) != 0:
            raise ValueError(f"{form} is a tiling for one GPU; only bitsandbytes' row form is read")

    def read() -> torch.Tensor:
        return stored[weight].read() * (stored[scale].read().float() / INT8_RANGE)[:, None]

    return PackedWeight(weight, tuple(parts), (rows, columns), "int8, one scale for a row", read)
