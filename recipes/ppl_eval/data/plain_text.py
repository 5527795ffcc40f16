"""Plain text files: decoded strictly, in flat memory, and cut into documents."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from ppl_eval.data.documents import Part, documents_of
from ppl_eval.data.input_files import open_binary

UNITS = ("file", "line", "blank_line")
_BLOCK_BYTES = 1 << 20
_LONE_RETURN = re.compile("\r(?!\n)")


class LineEnds:
    """Counts line ends that are not bare line feeds, over the files of a source.

    Attributes:
        crlf_files: files of which CRLF line ends were taken off.
        lone_files: files with a carriage return that no line feed follows.
    """

    def __init__(self) -> None:
        self.crlf_files = self.lone_files = 0

    def watch(self, text: Iterator[str]) -> Iterator[str]:
        """Pass on a file's text, in blocks that do not end between CR and LF."""
        has_lone = False
        for block in whole_line_ends(text):
            has_lone = has_lone or ("\r" in block and _LONE_RETURN.search(block) is not None)
            yield block
        self.lone_files += has_lone

    def notes(self, unit: str) -> list[str]:
        """Return what a reader of the result must know."""
        notes = []
        if self.crlf_files:
            notes.append(
                f"{self.crlf_files} files have CRLF line ends; with unit={unit} they end lines as LF does, "
                "and their carriage returns are not scored"
            )
        if self.lone_files:
            notes.append(
                f"{self.lone_files} files have carriage returns without a line feed (line ends of old "
                "Macs?); they end no line and are scored"
            )
        return notes


def plain_parts(file: Path, unit: str, line_ends: LineEnds) -> Iterator[Part]:
    """Read the documents of a file; ``unit`` is one of ``UNITS``."""
    if unit == "line":
        yield from _lines(file, line_ends)
    elif unit == "blank_line":
        yield from _paragraphs(file, line_ends)
    else:
        for text in line_ends.watch(decoded(file)):
            yield Part(text, is_last=False)
        yield Part("")


def whole_line_ends(blocks: Iterator[str]) -> Iterator[str]:
    """Pass on text in blocks none of which ends with a carriage return, except at the end of the text."""
    held = ""
    for block in blocks:
        text = held + block
        held = "\r" if text.endswith("\r") else ""
        yield text.removesuffix(held) if held else text
    if held:
        yield held


def _lines(file: Path, line_ends: LineEnds) -> Iterator[Part]:
    rest = ""
    has_crlf = False
    for text in line_ends.watch(decoded(file)):
        if "\r\n" in text:
            has_crlf = True
            text = text.replace("\r\n", "\n")
        # Only line feeds end a line: str.splitlines would also cut at form feeds and at Unicode separators.
        *lines, rest = text.split("\n")
        yield from map(Part, lines)
        if rest:
            yield Part(rest, is_last=False)
    if rest:
        yield Part("")
    line_ends.crlf_files += has_crlf


def _paragraphs(file: Path, line_ends: LineEnds) -> Iterator[Part]:
    lines: list[str] = []
    num_chars = 0
    glue = ""
    for line in documents_of(_lines(file, line_ends)):
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
