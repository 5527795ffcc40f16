"""Text sources: where documents come from, before any tokenizer sees them.

A source is a factory named in the config's ``dataset`` section. It returns a ``TextSource``, which can be
read more than once: once to hash the text, and again, on one rank of a node, to tokenise it.
"""

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNITS = ("file", "line", "blank_line")
_BLANK_LINES = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")


@dataclass(frozen=True)
class TextSource:
    """Documents of text.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        read: starts a new pass over the documents; empty ones are left in, the reader counts them.
    """

    name: str
    parameters: dict[str, Any]
    read: Callable[[], Iterator[str]]


def python_docs() -> TextSource:
    """The language reference that ships inside CPython (``pydoc_data.topics``), one document a topic, sorted
    by name.

    Real technical prose on every machine that runs this recipe. Its text differs between Python releases, and
    the fingerprint with it.
    """

    def read() -> Iterator[str]:
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name]

    return TextSource("python_docs", {}, read)


def text_files(paths: str | Sequence[str], unit: str = "file") -> TextSource:
    """Plain UTF-8 text files.

    Args:
        paths: files or globs (``**`` goes into folders); a glob's files are sorted by name.
        unit: what a document is: a whole ``file``, a ``line``, or a run of lines up to the next
            ``blank_line``.

    Raises:
        ValueError: if ``unit`` is unknown, or a path names no file.
    """
    if unit not in UNITS:
        raise ValueError(f"dataset.unit is {unit!r}; allowed: {', '.join(UNITS)}")
    files = expand_paths(paths)

    def read() -> Iterator[str]:
        for file in files:
            text = read_text(file)
            if unit == "file":
                yield text
            elif unit == "line":
                # Only line feeds end a line: str.splitlines would also cut at form feeds and at Unicode
                # separators.
                lines = text.split("\n")
                yield from lines[:-1] if lines[-1] == "" else lines
            else:
                yield from _BLANK_LINES.split(text.strip("\n"))

    return TextSource("text_files", {"paths": [str(file) for file in files], "unit": unit}, read)


def expand_paths(paths: str | Sequence[str]) -> list[Path]:
    """Files that a path, a glob, or a list of these names, in order.

    Raises:
        ValueError: if one of them names no file.
    """
    patterns = [paths] if isinstance(paths, str) else list(paths)
    if not patterns:
        raise ValueError("dataset.paths is empty; name at least one file")
    files: list[Path] = []
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        found = (
            [Path(expanded)]
            if Path(expanded).is_file()
            else sorted(map(Path, glob.glob(expanded, recursive=True)))
        )
        found = [path for path in found if path.is_file()]
        if not found:
            raise ValueError(f"dataset.paths: no file is named {pattern!r} (looked from {Path.cwd()})")
        files += found
    return files


def read_text(file: Path) -> str:
    """A file's text, decoded strictly and with its line ends as they are.

    Raises:
        ValueError: if the file is not UTF-8.
    """
    content = file.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file} is not UTF-8: byte {content[error.start]:#04x} at offset {error.start} (line {line});"
            f" convert it first, for example `iconv -f LATIN1 -t UTF-8 {file.name}`"
        ) from error
