"""Safetensors files, opened without copying them: one private mapping per tensor, and errors that name the
file.

``safetensors.safe_open`` maps a file once and keeps every page that was read resident until the last tensor
of the file is gone. Here each tensor has a mapping of its own, so that a tensor which had to be converted
gives its pages back at once. Mappings are private and never written to: all processes of a machine share the
pages through the page cache.
"""

import hashlib
import math
import mmap
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppl_eval.config.files import parse_json_object
from ppl_eval.config.retries import open_patiently

# Every dtype that a safetensors header can name and torch can hold.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BLOCKS = 64
SAMPLE_BLOCK_BYTES = 4096
MIB = 1024 * 1024


class StoredTensor(NamedTuple):
    """Where one tensor is.

    ``meta`` has its shape and dtype (a tensor on the meta device, or the tensor itself when it is a quantised
    one), ``read`` returns the values.
    """

    meta: torch.Tensor
    read: Callable[[], torch.Tensor]


def check_readable(path: Path) -> int:
    """Return the size of ``path`` in bytes.

    Raises:
        ValueError: if the file is missing, is no file, is empty, or is the text stub that Git LFS leaves
            behind.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} does not exist")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"checkpoint file {path} is empty (0 bytes): download or copy it again")
    with open_patiently(path) as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise ValueError(
                f"checkpoint file {path} is a Git LFS pointer of {size} bytes: run `git lfs pull` there"
            )
    return size


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Index a safetensors file; no tensor is read before its ``read`` is called.

    Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
    data.

    Raises:
        ValueError: if the file is truncated or corrupt (with its expected and its actual size), or holds an
            unknown dtype.
    """
    size = check_readable(path)
    with open_patiently(path) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > MAX_HEADER_BYTES or header_bytes == 0:
            raise ValueError(
                f"{path} is not a safetensors file: its header claims {header_bytes} bytes, the file has "
                f"{size}"
            )
        if 8 + header_bytes > size:
            raise ValueError(
                f"{path} is truncated: expected at least {8 + header_bytes} bytes for the header alone, "
                f"found {size}"
            )
        raw = file.read(header_bytes)
    try:
        header = parse_json_object(raw)
        header.pop("__metadata__", None)
        spans = {name: _span(entry) for name, entry in header.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError) as e:
        raise ValueError(
            f"{path} is corrupt: its safetensors header cannot be read ({type(e).__name__}: {e})"
        ) from e
    begin = 8 + header_bytes
    end = _check_contiguous(path, spans)
    stored = {name: _stored_tensor(path, name, header[name], begin + spans[name][0]) for name in header}
    if size != begin + end:
        what = "truncated" if size < begin + end else "corrupt (longer than its header says)"
        raise ValueError(
            f"{path} is {what}: expected {begin + end} bytes, found {size}; download or copy it again"
        )
    return stored


def _span(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end.

    Raises:
        ValueError: if these and the shape are not whole numbers from 0.
    """
    first, last = entry["data_offsets"]
    numbers = [first, last, *entry["shape"]]
    # bool is an int to Python.
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"shape or data_offsets hold something else than whole numbers from 0: {numbers}")
    return first, last


def _check_contiguous(path: Path, spans: Mapping[str, tuple[int, int]]) -> int:
    """Check that every byte of the data belongs to one tensor, as the format demands.

    Returns:
        The bytes of all data.

    Raises:
        ValueError: if two tensors share bytes, or bytes belong to none.
    """
    end, before = 0, "the header"
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first != end:
            what = "shares bytes with" if first < end else "leaves a hole behind"
            raise ValueError(
                f"{path} is corrupt: tensor {name} begins at byte {first} of the data and {what} {before},"
                f" which ends at {end}; download it again, or have its writer save it without shared tensors"
            )
        end, before = max(first, last), name
    return end


def _stored_tensor(path: Path, name: str, entry: Mapping[str, Any], begin: int) -> StoredTensor:
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{path}: tensor {name} has dtype {entry['dtype']}; known are {', '.join(SAFETENSORS_DTYPES)}"
        )
    shape = tuple(entry["shape"])
    first, last = entry["data_offsets"]
    # Not torch's product, which wraps at 2^64.
    num_bytes = math.prod(shape) * dtype.itemsize
    if last - first != num_bytes:
        raise ValueError(
            f"{path} is corrupt: tensor {name} of shape {shape} needs {num_bytes} bytes, its entry spans "
            f"{last - first}"
        )
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return StoredTensor(meta, partial(map_tensor, path, begin, shape, dtype))


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Map a tensor privately from ``path``, ``offset`` bytes in; the mapping ends with its last view.

    Every process maps the same page boundaries, so alignment, and with it the kernel chosen, is the same
    everywhere.
    """
    numel = torch.Size(shape).numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    skip = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapping = mmap.mmap(
            file.fileno(), skip + numel * dtype.itemsize, access=mmap.ACCESS_COPY, offset=offset - skip
        )
    flat = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=skip)
    if (
        offset % dtype.itemsize
    ):  # allowed by old writers; torch's kernels want whole elements on their boundary
        flat = flat.clone()
    return flat.view(shape)


def sampled_sha256(path: Path) -> str:
    """Fingerprint a large file by its size, first and last MiB, and evenly spaced blocks between them.

    The first MiB of a safetensors file holds its names and shapes, the last one of a torch file the CRC of
    each tensor.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open_patiently(path) as file:
        digest.update(file.read(MIB))
        for block in range(SAMPLE_BLOCKS):
            file.seek(size * block // SAMPLE_BLOCKS)
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
        file.seek(-min(size, MIB), os.SEEK_END)
        digest.update(file.read(MIB))
    return digest.hexdigest()
