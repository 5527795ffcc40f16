"""Plain text files: decoded strictly, in flat memory, and cut into documents."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from ppl_eval.data.documents import Part, documents_of
from ppl_eval.data.input_files import open_binary

UNITS = ("file", "line", "blank_line")
_BLOCK_BYTES = 1 << 20


def plain_parts(file: Path, unit: str) -> Iterator[Part]:
    """Read the documents of a file; ``unit`` is one of ``UNITS``."""
    if unit == "line":
        yield from _lines(file)
    elif unit == "blank_line":
        yield from _paragraphs(file)
    else:
        for text in decoded(file):
            yield Part(text, is_last=False)
        yield Part("")


def _lines(file: Path) -> Iterator[Part]:
    rest = ""
    for text in decoded(file):
        # Only line feeds end a line: str.splitlines would also cut at form feeds and at Unicode separators.
        *lines, rest = text.split("\n")
        yield from map(Part, lines)
        if rest:
            yield Part(rest, is_last=False)
    if rest:
        yield Part("")


def _paragraphs(file: Path) -> Iterator[Part]:
    lines: list[str] = []
    num_chars = 0
    glue = ""
    for line in documents_of(_lines(file)):
        if line.strip():
            lines.append(line)
            num_chars += len(line)
            if num_chars > _BLOCK_BYTES:
                yield Part(glue + "\n".join(lines), is_last=False)
                lines, num_chars, glue = [], 0, "\n"
        elif lines or glue:
            yield Part(glue + "\n".join(lines) if lines else "")
            lines, num_chars, glue = [], 0, ""
    if lines or glue:
        yield Part(glue + "\n".join(lines) if lines else "")


def decoded(file: Path) -> Iterator[str]:
    """Read a file's text in blocks, decoded strictly and with its line ends as they are.

    Raises:
        ValueError: if the file cannot be read, is damaged, or is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    seen_bytes, seen_lines = 0, 0
    with open_binary(file) as binary:
        while True:
            block = binary.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = seen_bytes - pending + error.start
                line = seen_lines + error.object.count(b"\n", 0, error.start) + 1
                raise ValueError(
                    f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at offset {at} (line "
                    f"{line}); convert it first, for example `iconv -f LATIN1 -t UTF-8 {file.name}`"
                ) from error
            if text:
                yield text
            if not block:
                return
            seen_bytes += len(block)
            seen_lines += block.count(b"\n")
