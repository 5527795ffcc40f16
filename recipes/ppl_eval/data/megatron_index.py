"""Megatron-LM's index files (``indexed_dataset.py``): type of the ids in a ``.bin``, and its documents."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Magic, version, type code, then counts of sequences and of document bounds.
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def read_index(index: Path, path: Path) -> tuple[np.dtype[Any], npt.NDArray[np.int64]]:
    """Read the index of the ids in ``path``.

    Returns:
        Their type, and where each document ends.

    Raises:
        ValueError: if one of the two is damaged, or the other does not fit it.
    """
    content = index.read_bytes()
    if len(content) < _HEAD.size or content[:9] != _MAGIC:
        raise ValueError(
            f"{index} is no Megatron index (it begins with {content[:9]!r}); move it away if it is none"
        )
    _, version, code, num_sequences, num_bounds = _HEAD.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{index} has version {version} and type code {code}; known are version 1 and {_DTYPES}"
        )
    expected = _HEAD.size + 12 * num_sequences + 8 * num_bounds
    # Multimodal data has a byte a sequence behind it, which says what kind it is: 0 is text.
    modes = content[expected:]
    if len(content) < expected or len(modes) not in (0, num_sequences):
        raise ValueError(
            f"{index} has {len(content)} bytes for {num_sequences} sequences and {num_bounds} document "
            f"bounds, which take {expected}; it is cut off or damaged"
        )
    if any(modes):
        raise ValueError(f"{index} names sequences that are not text, which is not supported")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(content, np.int32, num_sequences, _HEAD.size).astype(np.int64)
    pointers = np.frombuffer(content, np.int64, num_sequences, _HEAD.size + 4 * num_sequences)
    bounds = np.frombuffer(content, np.int64, num_bounds, _HEAD.size + 12 * num_sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any():
        raise ValueError(f"{index} names a sequence of {lengths.min()} ids; it is damaged")
    if not np.array_equal(pointers, (ends - lengths) * dtype.itemsize):
        raise ValueError(
            f"{index} names sequences that do not lie back to back in {path.name}; that is not supported"
        )
    num_tokens = int(ends[-1]) if num_sequences else 0
    size = path.stat().st_size
    if num_tokens == 0 or size != num_tokens * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, but {index.name} says {num_tokens} ids of {dtype}; one is damaged"
        )
    # Range before order: a difference of two wild bounds may overflow into a harmless one.
    within = num_bounds > 0 and bounds.min() >= 0 and bounds.max() <= num_sequences
    if not within or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{index} has document bounds that do not run from 0 to {num_sequences}; it is damaged"
        )
    return dtype, np.concatenate([[0], ends])[bounds[1:]]
