"""Files with a scale for each block, row or matrix of 8-bit floating-point numbers, and MXFP4.

``fp8`` is DeepSeek's form (blocks of 128 x 128, ``weight_scale_inv``) and AutoFP8's (one ``weight_scale``),
``fbgemm_fp8`` has a ``weight_scale`` for each row. In ``mxfp4`` 32 four-bit numbers share a power of two:
``<name>_blocks`` and ``<name>_scales`` of a matrix for each expert, which models multiply from the right.
"""

from functools import partial
from typing import Any

import torch

from ppl_eval.checkpoints.packed_values import (
    PackedWeight,
    Stored,
    check_dtype,
    check_shape,
    e8m0,
    in_blocks,
    num_blocks,
    per_block,
    unpack_e2m1,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("weight_scale_inv", "weight_scale")
# What belongs to the quantisation of activations.
FOR_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")
MXFP4_GROUP = 32


def activations(config: dict[str, Any]) -> str | None:
    """Return what the model does to activations."""
    scheme = config.get("activation_scheme", "dynamic")
    return f"activations are rounded to fp8 as well ({scheme})"


def find(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the quantised weights of a checkpoint.

    Args:
        stored: all its tensors.
        config: ``quantization_config``.

    Raises:
        ValueError: for a form that is not known here, or tensors that contradict the config.
    """
    if config.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(f"fp8 with experts in {config['expert_dtype']} is not read; take the bf16 weights")
    blocks = config.get("weight_block_size")
    if blocks is not None and not _two_sizes(blocks):
        raise ValueError(f"quantization_config has weight_block_size={blocks!r}; it must be two sizes")
    return [
        _layer(stored, name.removesuffix(".weight"), blocks)
        for name, tensor in stored.items()
        if name.endswith(".weight") and tensor.meta.dtype in FLOAT8
    ]


def _two_sizes(blocks: Any) -> bool:
    return isinstance(blocks, list) and len(blocks) == 2 and all(type(n) is int and n > 0 for n in blocks)


def _layer(stored: Stored, layer: str, blocks: list[int] | None) -> PackedWeight:
    rows, columns = shape = _matrix(stored, f"{layer}.weight")
    scales = [f"{layer}.{name}" for name in SCALES if f"{layer}.{name}" in stored]
    if len(scales) != 1:
        raise ValueError(f"{layer}.weight is fp8 and has {len(scales)} scales of {SCALES}; one is needed")
    found = tuple(stored[scales[0]].meta.shape)
    check_dtype(stored, scales[0], torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    if blocks:
        sizes, scheme = (blocks[0], blocks[1]), f"fp8, blocks of {blocks[0]} x {blocks[1]}"
        check_shape(stored, scales[0], num_blocks(shape, sizes))
    elif found in ((), (1,), (1, 1)):
        sizes, scheme = (rows, columns), "fp8, one scale for a matrix"
    else:
        check_shape(stored, scales[0], (rows, 1), (rows,))
        sizes, scheme = (1, columns), "fp8, one scale for a row"
    extra = [f"{layer}.{name}" for name in FOR_ACTIVATIONS if f"{layer}.{name}" in stored]
    read = partial(_dequantize, stored, f"{layer}.weight", scales[0], shape, sizes)
    return PackedWeight(f"{layer}.weight", (f"{layer}.weight", scales[0], *extra), shape, scheme, read)


def _matrix(stored: Stored, name: str) -> tuple[int, int]:
    shape = tuple(stored[name].meta.shape)
    if len(shape) != 2:
        raise ValueError(f"{name} is quantised and has the shape {list(shape)}, which is no matrix")
    return shape[0], shape[1]


def _dequantize(
    stored: Stored, weight: str, scale: str, shape: tuple[int, int], sizes: tuple[int, int]
) -> torch.Tensor:
    codes = stored[weight].read()
    scales = stored[scale].read().float().reshape(num_blocks(shape, sizes))
    return in_blocks(shape, lambda rows: codes[rows].float() * per_block(scales, sizes, rows, shape[1]))


def find_mxfp4(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the MXFP4 weights of a checkpoint: [experts, in, out] each.

    Raises:
        ValueError: if blocks and scales do not fit together.
    """
    found = []
    for name in stored:
        if not name.endswith("_blocks"):
            continue
        weight, scales = name.removesuffix("_blocks"), f"{name.removesuffix('_blocks')}_scales"
        shape = tuple(stored[name].meta.shape)
        if len(shape) != 4 or shape[3] != MXFP4_GROUP // 2:
            raise ValueError(f"{name} has the shape {list(shape)}; MXFP4 has [experts, rows, groups, 16]")
        check_shape(stored, scales, shape[:3])
        for part in (name, scales):
            check_dtype(stored, part, torch.uint8)
        experts, rows, groups, _ = shape
        read = partial(_mxfp4, stored, name, scales)
        whole = (experts, groups * MXFP4_GROUP, rows)
        found.append(PackedWeight(weight, (name, scales), whole, "MXFP4, groups of 32", read))
    return found


def _mxfp4(stored: Stored, blocks: str, scales: str) -> torch.Tensor:
    codes_ENGB, exponents_ENG = stored[blocks].read(), stored[scales].read()
    experts, rows, groups, _ = codes_ENGB.shape
    weight_EDN = torch.empty(experts, groups * MXFP4_GROUP, rows, dtype=torch.float32)
    for expert, matrix_DN in enumerate(weight_EDN):
        values = unpack_e2m1(codes_ENGB[expert]) * e8m0(exponents_ENG[expert])[..., None]
        matrix_DN.copy_(values.flatten(1).T)
    return weight_EDN
