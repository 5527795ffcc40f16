"""Where the ids of a token file lie and of what type they are, by what the file itself states.

Known are NumPy's ``.npy``, Megatron's ``.bin`` with an ``.idx``, and the ``.bin`` of llm.c and modded-nanogpt
(a header of 256 int32: magic, version, number of ids). Anything else is bare ids, as nanoGPT writes them,
unless its first bytes are those of a form that is not.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.data.file_formats import HEAD_BYTES, NPY, foreign_format, looks_like_text
from ppl_eval.data.megatron_index import read_index

_LLM_C_HEADER = np.dtype(("<i4", 256))
# Magic: versions in use, and type of the ids (dev/data/data_common.py of llm.c).
_LLM_C = {20240520: ((1,), "uint16"), 20240801: ((1, 7), "uint32")}
_LLM_C_EVALUATION = 20240522
_MDS_INDEX = re.compile(rb'"format"\s*:\s*"mds"')


@dataclass(frozen=True)
class Layout:
    """Where ids lie in a file.

    Attributes:
        dtype: their type.
        begin_bytes: where the first begins.
        length: how many there are.
        ends: where documents end, if an index says so.
    """

    dtype: np.dtype[Any]
    begin_bytes: int
    length: int
    ends: npt.NDArray[np.int64] | None = None


def index_of(path: Path) -> Path | None:
    """Return the Megatron index of a ``.bin``; None where there is none."""
    index = path.with_suffix(".idx")
    return index if path.suffix.lower() == ".bin" and index.is_file() else None


def stated_layout(path: Path) -> Layout | None:
    """Return what a file or its index states; None for bare ids.

    Raises:
        ValueError: if the file is damaged, or is of a form that cannot be read; says what to do.
    """
    index = index_of(path)
    if index is not None:
        dtype, ends = read_index(index, path)
        return Layout(dtype, 0, path.stat().st_size // dtype.itemsize, ends)
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(NPY):
        return _npy(path)
    if ".mds" in path.suffixes or (path.name == "index.json" and _MDS_INDEX.search(head)):
        raise ValueError(
            f"{path} belongs to a folder of MosaicML streaming (MDS), whose shards cannot be mapped; read it "
            "with streaming.StreamingDataset and save the ids as one array with numpy.save"
        )
    form = foreign_format(head)
    if form is not None:
        raise ValueError(f"{path} is {form[0]}, not a file of token ids; {form[1]}")
    if looks_like_text(head):
        raise ValueError(f"{path} is text, not a file of token ids; ppl_eval.data.text_files reads text")
    return _llm_c(path, head)


def bare_layout(path: Path, dtype: np.dtype[Any]) -> Layout:
    """Return the layout of a file of ids and nothing else.

    Raises:
        ValueError: if it is empty or cut off.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is no whole number of {dtype} ids; it is cut off, or "
            "dataset.dtype is another"
        )
    return Layout(dtype, 0, size // dtype.itemsize)


def _npy(path: Path) -> Layout:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy's reader raises whatever a damaged header leads to
        raise ValueError(f"{path} cannot be read as a .npy file of ids: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds an array of shape {array.shape} and type {array.dtype}; a token file holds whole "
            "numbers in one dimension: save array.reshape(-1) if its rows are pieces of one stream"
        )
    begin = array.offset
    size = path.stat().st_size
    if size != begin + array.nbytes:
        raise ValueError(
            f"{path} has {size} bytes, but its header says {begin + array.nbytes}; it is damaged"
        )
    return Layout(array.dtype, begin, len(array))


def _llm_c(path: Path, head: bytes) -> Layout | None:
    magic = int.from_bytes(head[:4], "little")
    if magic == _LLM_C_EVALUATION:
        raise ValueError(
            f"{path} is a multiple-choice evaluation file of llm.c, which holds no running text; give a "
            "token file (its dev/data scripts write them)"
        )
    if magic not in _LLM_C:
        return None
    versions, name = _LLM_C[magic]
    dtype = np.dtype(name)
    size, begin = path.stat().st_size, _LLM_C_HEADER.itemsize
    if size <= begin:
        raise ValueError(
            f"{path} begins like a token file of llm.c, but ends inside its header ({size} bytes)"
        )
    _, version, length = (int(value) for value in np.frombuffer(head, "<i4", 3))
    if version not in versions or size != begin + length * dtype.itemsize:
        raise ValueError(
            f"{path} begins like a token file of llm.c (magic {magic}), but says version {version} and "
            f"{length} ids of {dtype}, which take {begin + length * dtype.itemsize} bytes, not {size}; known "
            f"versions are {versions}. It is damaged"
        )
    return Layout(dtype, begin, length)


class WidthCheck:
    """Tells whether ids of a type that nobody stated may be of a wider one.

    Ids of twice the width look like pairs of which the second is zero (or small, where the vocabulary is
    large). A file that could mean two things is refused and not guessed.

    Args:
        vocab_size: ids are below it.
    """

    _SMALL = 3
    _LEAST_PAIRS = 16

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_pairs = self._num_small_first = self._num_small_second = 0
        self._wider_fits, self._is_even = True, True

    def add(self, block: npt.NDArray[Any]) -> None:
        """Look at the next ids; all blocks but the last have an even number of them."""
        self._is_even = len(block) % 2 == 0
        first, second = block[: len(block) // 2 * 2].reshape(-1, 2).T.astype(np.int64)
        self._num_pairs += len(first)
        self._num_small_first += int(np.count_nonzero(first <= self._SMALL))
        self._num_small_second += int(np.count_nonzero(second <= self._SMALL))
        wider = first + (second << 8 * block.itemsize)
        self._wider_fits &= bool((second >> 31 == 0).all() and (wider < self._vocab_size).all())

    def is_ambiguous(self) -> bool:
        """Return whether the ids seen may be of a wider type."""
        fits = self._wider_fits and self._is_even and self._num_pairs > 0
        seconds_small = self._num_small_second > 0.9 * max(self._num_pairs, self._LEAST_PAIRS)
        return fits or (seconds_small and self._num_small_first < self._num_small_second / 2)
