"""What the data factories return, and how files are opened: plain, ``.gz`` or ``.zst``."""

import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

# The domain of sources that name none.
ALL = "all"


class Part(NamedTuple):
    """A part of a document, so that a document larger than memory can be read.

    Attributes:
        text: what is scored.
        is_last: whether it ends its document.
        domain: name of the document's domain.
        original: the text whose bytes and words count, where that is not the text that is scored (a
            detokenised corpus); None where it is.
    """

    text: str
    is_last: bool = True
    domain: str = ALL
    original: str | None = None


@dataclass(frozen=True)
class TextSource:
    """Documents of text.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        read: starts a new pass over the documents; empty ones are left in, the reader counts them.
        read_parts: the same in parts, where a source has more to say than ``read`` can; it appends what a
            reader of the result must know to the list that it is given.
        stamp: something that changes when the content may have; what was hashed under the same stamp is not
            hashed again. None for a source that cannot tell.
    """

    name: str
    parameters: dict[str, Any]
    read: Callable[[], Iterator[str]]
    read_parts: Callable[[list[str]], Iterator[Part]] | None = None
    stamp: Callable[[], Any] | None = None

    def parts(self, notes: list[str]) -> Iterator[Part]:
        """A new pass over all parts of all documents, in order."""
        if self.read_parts is not None:
            return self.read_parts(notes)
        return (Part(text) for text in self.read())


def source_of_parts(
    name: str,
    parameters: dict[str, Any],
    read_parts: Callable[[list[str]], Iterator[Part]],
    stamp: Callable[[], Any] | None = None,
) -> TextSource:
    """A source that reads in parts; ``read`` joins them to documents."""
    return TextSource(name, parameters, lambda: documents_of(read_parts([])), read_parts, stamp)


def documents_of(parts: Iterable[Part]) -> Iterator[str]:
    """Whole documents."""
    together: list[str] = []
    for part in parts:
        together.append(part.text)
        if part.is_last:
            yield "".join(together)
            together = []


def domains(sources: Mapping[str, Any]) -> Any:
    """Several sources, each a domain with figures of its own. A protocol that joins documents joins inside a
    domain.

    Args:
        sources: name of a domain to the section of its source, each with a ``_component_``; all of one kind
            (text, token files or samples).

    Raises:
        ValueError: if a section is no source, or the kinds differ.
    """
    if not sources:
        raise ValueError("dataset.sources is empty; give a mapping of a domain's name to its source")
    built = {name: _build(f"dataset.sources.{name}", section) for name, section in sources.items()}
    kinds = {type(source) for source in built.values()}
    if len(kinds) > 1:
        told = ", ".join(f"{name}: {type(source).__name__}" for name, source in built.items())
        raise ValueError(f"dataset.sources mixes kinds of sources ({told}); one run takes one kind")
    first = next(iter(built.values()))
    if not isinstance(first, TextSource):
        return first.merge(built)
    stamps = {name: source.stamp for name, source in built.items()}

    def read_parts(notes: list[str]) -> Iterator[Part]:
        for name, source in built.items():
            notes_here: list[str] = []
            for part in source.parts(notes_here):
                yield part._replace(domain=name)
            notes += [f"{name}: {note}" for note in notes_here]

    def stamp() -> Any:
        return {name: stamp() for name, stamp in stamps.items() if stamp is not None}

    parameters = {"sources": {name: {"name": s.name, **s.parameters} for name, s in built.items()}}
    return source_of_parts("domains", parameters, read_parts, stamp if all(stamps.values()) else None)


def _build(key: str, section: Any) -> Any:
    from omegaconf import OmegaConf

    from ppl_eval.config.components import instantiate

    if not isinstance(section, Mapping) or "_component_" not in section:
        raise ValueError(
            f"{key} is {section!r}; it must be a section with a _component_, such as ppl_eval.data.text_files"
        )
    return instantiate(key, OmegaConf.create(dict(section)))


def expand_paths(paths: str | Sequence[str], key: str = "dataset.paths") -> list[Path]:
    """Files that a path, a glob, or a list of these names, in order; a glob's files are sorted by name.

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


def stamp_of(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change (ns) of files."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


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
