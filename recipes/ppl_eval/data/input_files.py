"""The files that a dataset names: found, stamped, and opened whatever they are compressed with."""

import glob
import gzip
import hashlib
import io
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ppl_eval.config.retries import open_patiently
from ppl_eval.data.file_formats import HEAD_BYTES, foreign_format, utf_name

COMPRESSED = (".gz", ".zst")
# A file that changed this short a time ago may change again without its time of change showing it.
_RACY_NS = 2 * 10**9


@dataclass
class InputFiles:
    """The files that ``dataset.paths`` names, each once.

    Attributes:
        files: them, in order of their first mention.
        repeated: names of those that were named more than once.
    """

    files: list[Path] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    def parameters(self) -> dict[str, Any]:
        """Return them as parameters of a source."""
        named = {"paths": [str(file) for file in self.files]}
        return named | {"named_more_than_once": self.repeated} if self.repeated else named

    def notes(self) -> list[str]:
        """Return what a reader of the result must know."""
        if not self.repeated:
            return []
        return [f"dataset.paths names {', '.join(self.repeated)} more than once; each file was read once"]


def expand_paths(paths: str | Sequence[str], key: str = "dataset.paths") -> InputFiles:
    """Find the files that a path, a glob, or a list of these names; a glob's are sorted by name.

    A file that is named again, also by another name (a link, ``./``), is left out.

    Raises:
        ValueError: if one of them is no text or names no file.
    """
    found, seen = InputFiles(), set()
    for pattern in _patterns(paths, key):
        for path in _matches(pattern, key):
            identity = _identity(path)
            if identity not in seen:
                seen.add(identity)
                found.files.append(path)
            elif str(path) not in found.repeated:
                found.repeated.append(str(path))
    return found


def _patterns(paths: Any, key: str) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    elif not isinstance(paths, Sequence) or isinstance(paths, bytes):
        raise ValueError(f"{key} is {paths!r}; it must be a path, a glob, or a list of these")
    if not len(paths):
        raise ValueError(f"{key} is empty; name at least one file")
    for at, pattern in enumerate(paths):
        if not isinstance(pattern, (str, os.PathLike)) or not str(pattern).strip():
            where = key if len(paths) == 1 else f"{key}[{at}]"
            raise ValueError(
                f"{where} is {pattern!r}; it must be the name of a file or a glob (in quotes where YAML "
                "would read a number)"
            )
    return [str(pattern) for pattern in paths]


def _matches(pattern: str, key: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not files and path.is_dir():
        raise ValueError(f"{key}: {pattern!r} is a folder; name its files, for example {pattern}/*")
    if not files:
        raise ValueError(f"{key}: no file is named {pattern!r} (looked from {Path.cwd()})")
    return files


def _identity(path: Path) -> Any:
    at = path.stat()
    # Only where a file has several names: not every file system has inodes that mean something.
    return (at.st_dev, at.st_ino) if at.st_nlink > 1 else path.resolve()


def refuse_repeated(names: Iterable[Any], key: str) -> None:
    """Refuse a list of names in which a local file occurs twice; names of anything else pass.

    Raises:
        ValueError: if one does.
    """
    local = [name for name in names if isinstance(name, str) and glob.glob(str(Path(name).expanduser()))]
    repeated = expand_paths(local, key).repeated if local else []
    if repeated:
        raise ValueError(f"{key} names {', '.join(repeated)} more than once; name each file once")


def notes_on_shared_files(paths: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a note for each file that more than one domain names; name of a domain to its files."""
    domains: dict[Any, list[str]] = {}
    names: dict[Any, str] = {}
    for domain, files in paths.items():
        for name in files:
            identity = _identity(Path(name))
            domains.setdefault(identity, []).append(domain)
            names.setdefault(identity, name)
    return [
        f"{names[identity]} is in the domains {', '.join(of)}: it is scored in each, and counts as often in "
        "the total"
        for identity, of in domains.items()
        if len(of) > 1
    ]


def places_of(files: Iterable[Path]) -> list[list[Any]]:
    """Return path, device, inode, size, and times (ns) of change of content and of inode, of each file.

    The content's time can be set by anybody; the inode's cannot, on a file system that keeps one.
    """
    return [_place(path, path.stat()) for path in files]


def _place(path: Path, at: os.stat_result) -> list[Any]:
    return [str(path.resolve()), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]


def stamp_of(files: Iterable[Path]) -> list[list[Any]] | None:
    """Return place and SHA-256 of files as a source's stamp; None where one of them changed just now.

    The hash is what identifies them: some file systems (network mounts, FAT) keep no time that cannot be set.
    The place is there because a file may change between this and the reading.
    """
    stamp = []
    for path in files:
        # Opened before its times are looked at: a network file system may answer from old memory otherwise.
        with open_patiently(path) as file:
            place = _place(path, os.fstat(file.fileno()))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time_ns() - max(place[-2:]) < _RACY_NS or places_of([path]) != [place]:
            return None
        stamp.append([*place, digest])
    return stamp


@contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file of text for reading as bytes, decompressed by its suffix.

    Raises:
        ValueError: if the file cannot be read, is damaged, is of another form by its first bytes, or is zstd
            and the package for it is missing.
    """
    try:
        with _opened(path) as file:
            _refuse_other_forms(path, file.peek(HEAD_BYTES)[:HEAD_BYTES])
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no whole gzip file: {error}; make it anew (`gzip -t` tests one)"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _refuse_other_forms(path: Path, head: bytes) -> None:
    encoding, form = utf_name(head), foreign_format(head)
    if encoding is not None:
        raise ValueError(
            f"{path} is {encoding}, not UTF-8; convert it first: `iconv -f {encoding} -t UTF-8 {path.name}`"
        )
    if form is not None:
        raise ValueError(f"{path} is {form[0]}, not text; {form[1]}")


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    if path.suffix.lower() == ".gz":
        with open_patiently(path) as raw, gzip.open(raw, "rb") as unpacked:
            yield io.BufferedReader(unpacked, 1 << 20)
    elif path.suffix.lower() == ".zst":
        with open_patiently(path) as raw:
            yield io.BufferedReader(_ZstdFile(raw, path), 1 << 20)
    else:
        with open_patiently(path) as file:
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
