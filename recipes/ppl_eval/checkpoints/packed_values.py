"""Quantised numbers as files pack them, and how they become weights again.

A weight is (code - zero point) * scale, computed in float32. For the usual scales of 16 bits and codes of up
to 8 the product is exact, so the only rounding left is the one to the run's dtype; libraries that multiply in
the dtype of the scales give the same number when that is the run's dtype too.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ppl_eval.checkpoints.safetensors import StoredTensor

Stored = Mapping[str, StoredTensor]
# Codes are unpacked a few rows at a time: int32 codes and their scales are several times the weight.
VALUES_AT_ONCE = 1 << 22
# Four-bit floating point (E2M1), by code: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedWeight(NamedTuple):
    """A weight that a file holds in several tensors.

    Attributes:
        name: of the weight that they make up.
        parts: names of the tensors.
        shape: of the weight.
        scheme: what was done to it, for people.
        read: unpacks and dequantises it, in float32.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    scheme: str
    read: Callable[[], torch.Tensor]


def unpack_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the codes in rows of 32-bit words: code k takes the bits from k * bits on, lowest first.

    Args:
        words: int32 [rows, words].
        bits: of a code, 1 to 8.
        count: codes of a row.

    Returns:
        int32 [rows, count], from 0 to 2^bits - 1.
    """
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[:, :, None] >> shifts) & mask).flatten(1)[:, :count]
    first = torch.arange(count) * bits
    word, shift = first // 32, (first % 32).to(torch.int64)
    # A code may reach into the next word; the last has none.
    wide = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    both = wide[:, word] | (wide[:, word + 1] << 32)
    return ((both >> shift) & mask).to(torch.int32)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of bytes with two four-bit numbers each, the lower one first."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return torch.tensor(E2M1, dtype=torch.float32)[codes.int()]


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the float32 powers of two that uint8 exponents with a bias of 127 stand for."""
    powers = exponents.to(torch.int32) - 127
    return torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)


def in_blocks(
    shape: tuple[int, int], values_of: Callable[[slice], torch.Tensor], *, multiple: int = 1
) -> torch.Tensor:
    """Make a float32 matrix some rows at a time.

    Args:
        shape: of the matrix.
        values_of: the values of some rows.
        multiple: every block but the last has a multiple of so many rows.
    """
    rows, columns = shape
    step = max(1, VALUES_AT_ONCE // max(1, columns) // multiple) * multiple
    weight = torch.empty(shape, dtype=torch.float32)
    for first in range(0, rows, step):
        block = slice(first, min(first + step, rows))
        weight[block] = values_of(block)
    return weight


def num_groups(columns: int, group_size: int, name: str) -> int:
    """Return how many groups of columns share a scale; -1 stands for all columns.

    Raises:
        ValueError: if they do not divide the width.
    """
    size = columns if group_size == -1 else group_size
    if size <= 0 or columns % size:
        raise ValueError(f"{name}: {columns} columns cannot be divided into groups of {group_size}")
    return columns // size


def check_shape(stored: Stored, name: str, *allowed: tuple[int, ...]) -> None:
    """Refuse a part of a weight that is missing or has another shape.

    Raises:
        ValueError: naming it.
    """
    if name not in stored:
        raise ValueError(f"the checkpoint has no {name}, which its quantization_config asks for")
    shape = tuple(stored[name].meta.shape)
    if shape not in allowed:
        expected = " or ".join(str(list(each)) for each in allowed)
        raise ValueError(f"{name} has the shape {list(shape)}; its quantization_config asks for {expected}")


def check_dtype(stored: Stored, name: str, *allowed: torch.dtype) -> None:
    """Refuse a part of a weight that is stored in another dtype.

    Raises:
        ValueError: naming it.
    """
    dtype = stored[name].meta.dtype
    if dtype not in allowed:
        raise ValueError(f"{name} is stored as {dtype}; known are {', '.join(map(str, allowed))}")


def setting(config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """Return a value of quantization_config.

    Raises:
        ValueError: if it is missing and has no default, or is of another kind.
    """
    value = config.get(key, default)
    if type(value) is not kind:
        raise ValueError(f"quantization_config has {key}={value!r}; it must be a {kind.__name__}")
    return value


def layers_with(stored: Stored, suffix: str) -> list[str]:
    """Return the layers of which a tensor ``<layer>.<suffix>`` is stored."""
    return [name.removesuffix(f".{suffix}") for name in stored if name.endswith(f".{suffix}")]


def per_block(scales: torch.Tensor, sizes: tuple[int, int], rows: slice, columns: int) -> torch.Tensor:
    """Return the scale of every value of some rows, where blocks of ``sizes`` rows and columns share one."""
    of_rows = torch.arange(rows.start, rows.stop) // sizes[0]
    return scales[of_rows].float().repeat_interleave(sizes[1], dim=1)[:, :columns]


def num_blocks(shape: tuple[int, int], sizes: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks there are, the last of a row or column perhaps cut short."""
    return math.ceil(shape[0] / sizes[0]), math.ceil(shape[1] / sizes[1])
