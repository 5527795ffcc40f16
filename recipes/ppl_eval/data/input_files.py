"""The files that a dataset names: found, stamped, and opened whatever they are compressed with."""

import glob
import gzip
import io
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# A file that changed this short a time ago may change again without its time of change showing it.
_RACY_NS = 2 * 10**9


def expand_paths(paths: str | Sequence[str], key: str = "dataset.paths") -> list[Path]:
    """Return the files that a path, a glob, or a list of these names, in order; a glob's are sorted by name.

    Raises:
        ValueError: if one of them names no file.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise ValueError(f"{key} is empty; name at least one file")
    files: list[Path] = []
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        globbed = sorted(map(Path, glob.glob(expanded, recursive=True)))
        found = [Path(expanded)] if Path(expanded).is_file() else [path for path in globbed if path.is_file()]
        if not found:
            raise ValueError(f"{key}: no file is named {pattern!r} (looked from {Path.cwd()})")
        files += found
    return files


def places_of(files: Iterable[Path]) -> list[list[Any]]:
    """Return path, inode, size, and times (ns) of change of content and of inode, of each file.

    The content's time can be set by anybody; the inode's cannot.
    """
    found = [(path.resolve(), path.stat()) for path in files]
    return [[str(path), at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns] for path, at in found]


def stamp_of(files: Iterable[Path]) -> list[list[Any]] | None:
    """Return ``places_of`` files as a source's stamp; None where one of them changed just now."""
    places = places_of(files)
    newest = max((time_ns for place in places for time_ns in place[-2:]), default=0)
    return None if time.time_ns() - newest < _RACY_NS else places


@contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed by its suffix.

    Raises:
        ValueError: if the file cannot be read, is damaged, or is zstd and the package for it is missing.
    """
    try:
        with _opened(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no whole gzip file: {error}; make it anew (`gzip -t` tests one)"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as unpacked:
            yield io.BufferedReader(unpacked, 1 << 20)
    elif path.suffix == ".zst":
        with open(path, "rb") as raw:
            yield io.BufferedReader(_ZstdFile(raw, path), 1 << 20)
    else:
        with open(path, "rb") as file:
            yield file


class _ZstdFile(io.RawIOBase):
    """Reads zstd frames, and says where the last is cut off: zstandard's own reader just ends there."""

    def __init__(self, raw: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"reading {path} needs the package zstandard: pip install 'distributed_ppl_eval[zstd]'"
            ) from error
        self._zstandard, self._raw, self._path = zstandard, raw, path
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(1 << 17)
            if not self._input:
                if self._frame is not None:
                    raise self._damaged("it ends inside a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._output = self._frame.decompress(self._input)
            except self._zstandard.ZstdError as error:
                raise self._damaged(error) from error
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def _damaged(self, why: object) -> ValueError:
        return ValueError(f"{self._path} is no whole zstd file: {why}; make it anew (`zstd -t` tests one)")
