"""Token files as other tools write them."""

import struct
from pathlib import Path

import numpy as np

SEPARATOR = 1  # <|endoftext|>, the tokenizer's EOS
IDS = np.array([5, 6, 7, SEPARATOR, 8, SEPARATOR, 9, 10, 11, 12, SEPARATOR, 13, 14])


def write_bin(path: Path, ids: np.ndarray = IDS, dtype: str = "uint16") -> str:
    ids.astype(dtype).tofile(path)
    return str(path)


def write_megatron(path: Path, ids: np.ndarray, lengths: list[int], bounds: list[int], code: int = 8) -> str:
    dtype = {4: "int32", 8: "uint16"}[code]
    write_bin(path, ids, dtype)
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(bounds))
    arrays = (
        np.array(lengths, np.int32).tobytes()
        + pointers.astype(np.int64).tobytes()
        + np.array(bounds, np.int64).tobytes()
    )
    path.with_suffix(".idx").write_bytes(head + arrays)
    return str(path)


def write_llm_c(path: Path, ids: np.ndarray = IDS, magic: int = 20240520, version: int = 1) -> str:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    dtype = "<u4" if magic == 20240801 else "<u2"
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return str(path)
