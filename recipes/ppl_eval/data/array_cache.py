"""A cache of plain arrays: written as values come, in folders named by content, whole or not there at all."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock

from ppl_eval.config.files import whole_folder, write_json

ABOUT = "about.json"
_FLUSH_VALUES = 1 << 18
_BLOCK_BYTES = 1 << 24
_HASH_THREADS = 4


class ArrayWriter:
    """Appends to a one-dimensional array on disk; little endian, without a header, so that its length need
    not be known first.

    No file stays open between writes: there may be one writer for each of a thousand domains.

    Args:
        path: the file.
        dtype: of its values.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self._values: list[int] = []
        self._arrays: list[npt.NDArray[Any]] = []
        self._num_waiting = 0
        path.write_bytes(b"")

    def append(self, value: int) -> None:
        """Add one value."""
        self._values.append(value)
        self._count(1)

    def extend(self, values: npt.NDArray[Any] | Sequence[int]) -> None:
        """Add values."""
        self._gather()
        self._arrays.append(np.asarray(values, dtype=None if len(values) else self.dtype))
        self._count(len(values))

    def take(self, other: "ArrayWriter") -> None:
        """Add the values of another array of this type, whose file goes."""
        assert other.dtype == self.dtype
        other._flush()
        self._flush()
        if self.length == 0:
            other.path.replace(self.path)
        else:
            with open(other.path, "rb") as source, open(self.path, "ab") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            other.path.unlink()
        self.length += other.length

    def close(self) -> dict[str, Any]:
        """Write what is left, and describe the array for ``open_array``.

        Raises:
            ValueError: (as ``append`` and ``extend`` do) if a value does not fit the type.
        """
        self._flush()
        return {"file": self.path.name, "dtype": self.dtype.name, "length": self.length}

    def _count(self, more: int) -> None:
        self.length += more
        self._num_waiting += more
        # Not one by one: most documents are a few dozen tokens.
        if self._num_waiting >= _FLUSH_VALUES:
            self._flush()

    def _gather(self) -> None:
        if self._values:
            self._arrays.append(np.array(self._values, dtype=np.int64))
            self._values = []

    def _flush(self) -> None:
        self._gather()
        if self._num_waiting:
            values = np.concatenate(self._arrays)
            limits = np.iinfo(self.dtype)
            if values.min() < limits.min or values.max() > limits.max:
                raise ValueError(
                    f"{self.path.stem}: a value of {values.min()}..{values.max()} does not fit {self.dtype}"
                )
            with open(self.path, "ab") as file:
                file.write(values.astype(self.dtype).tobytes())
        self._arrays, self._num_waiting = [], 0


def open_array(folder: Path, description: dict[str, Any]) -> npt.NDArray[Any]:
    """Map an array that ``ArrayWriter.close`` described, or a part of a user's own file.

    Raises:
        ValueError: if the file is not what it was when it was described.
    """
    path = folder / description["file"]
    dtype, length = np.dtype(description["dtype"]), description["length"]
    begin = description.get("begin_bytes", 0)
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; run again to make it anew") from error
    # A user's own file is described with what cannot stay the same when it is replaced.
    changed = any(getattr(stat, key) != value for key, value in description.items() if key.startswith("st_"))
    if changed or stat.st_size < begin + length * dtype.itemsize:
        raise ValueError(
            f"{path} is not what it was when it was read first ({stat.st_size} bytes); delete {folder} and "
            "run again"
        )
    if length == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=(length,))


def key_of(facts: Any) -> str:
    """Return a name for what these facts identify."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def build_once(cache: Path, key: str, write: Callable[[Path], dict[str, Any]]) -> Path:
    """Return the folder of a key; write it unless it is there already, whole and undamaged.

    Jobs that start together wait for the first; the lock dies with its process. What a killed job left behind
    is thrown away.

    Args:
        cache: folder of all folders.
        key: the folder's name.
        write: fills an empty folder; what it returns becomes its ``about.json``.
    """
    folder = cache / key
    if not is_whole(folder):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            if not is_whole(folder):
                with whole_folder(folder) as half:
                    about = write(half)
                    files = sorted(path.name for path in half.iterdir())
                    sums = {name: block_sums(half / name) for name in files}
                    write_checked(half / ABOUT, {**about, "block_sums": sums})
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder that ``build_once`` wrote is there and every file in it is what was written.

    All is read, by several threads, at the speed of memory or of the disk. A folder that is damaged is named
    on stderr.
    """
    # A folder without its description is what a cleaner left of one that was whole.
    about = read_checked(folder / ABOUT)
    if about is None:
        return False
    for name, sums in about["block_sums"].items():
        try:
            found = block_sums(folder / name)
        except OSError:
            found = []
        if found != sums:
            print(f"{folder / name} is damaged: the token cache is made anew", file=sys.stderr, flush=True)
            return False
    return True


def block_sums(path: Path) -> list[str]:
    """Return the XXH3 hashes of a file's blocks."""
    size = path.stat().st_size
    if size == 0:
        return []
    content = np.memmap(path, dtype=np.uint8, mode="r")

    def block_sum(begin: int) -> str:
        return xxhash.xxh3_128_hexdigest(content[begin : begin + _BLOCK_BYTES].data)

    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        return list(threads.map(block_sum, range(0, size, _BLOCK_BYTES)))


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that ``read_checked`` recognises as whole."""
    write_json(path, {"content": content, "sum": key_of(content)})


def read_checked(path: Path) -> Any:
    """Return what ``write_checked`` wrote, or None where there is none or it is damaged."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return read["content"] if read["sum"] == key_of(read["content"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
