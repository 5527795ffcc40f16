"""Bytes and words of a text that comes in parts, counted as the reference tools count them."""

import re
from typing import NamedTuple

import numpy as np

SEPARATORS = ("white_space", "space")
# White space to Python's `\s` and `str.isspace`; the last entry stands for everything above.
_LAST_SPACE = 0x3000
_RUN = re.compile(r"\s+")
# Below this, a regular expression is faster than numpy's start.
_SHORT = 1000
_IS_SPACE = np.array([chr(code).isspace() for code in range(_LAST_SPACE + 1)] + [False])


class TextSize(NamedTuple):
    """UTF-8 bytes and words of a document, and whether it has CRLF line ends or begins with a byte order
    mark.
    """

    num_bytes: int
    num_words: int
    has_crlf: bool
    has_bom: bool


class TextCounter:
    r"""Counts one document, part by part.

    ``white_space`` counts as lm-evaluation-harness does, ``len(re.split(r"\s+", text))``: empty strings at
    the ends count. ``space`` counts as Megatron-LM's zero-shot evaluation does,
    ``len(text.strip().split(" "))``: two spaces hold an empty word.

    Args:
        separator: what separates words, one of ``SEPARATORS``.
    """

    def __init__(self, separator: str = "white_space") -> None:
        if separator not in SEPARATORS:
            raise ValueError(f"word_separator is {separator!r}; allowed: {', '.join(SEPARATORS)}")
        self._by_space = separator == "space"
        self._num_bytes = self._num_runs = self._open_spaces = 0
        self._ends_in_space = self._ends_in_cr = self._has_crlf = self._has_bom = False
        self._has_text = False

    def add(self, text: str) -> None:
        """Count a part."""
        if not text:
            return
        if self._num_bytes == 0:
            self._has_bom = text[0] == "\ufeff"
        self._has_crlf = self._has_crlf or (self._ends_in_cr and text[0] == "\n") or "\r\n" in text
        self._ends_in_cr = text[-1] == "\r"
        self._num_bytes += len(text) if text.isascii() else len(text.encode())
        if self._by_space:
            self._add_spaces(text)
        elif len(text) < _SHORT:
            self._add_runs(len(_RUN.findall(text)), text[0].isspace(), text[-1].isspace())
        else:
            codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
            is_space = _IS_SPACE[np.minimum(codes, _LAST_SPACE + 1)]
            begins = np.count_nonzero(is_space[1:] & ~is_space[:-1]) + int(is_space[0])
            self._add_runs(int(begins), bool(is_space[0]), bool(is_space[-1]))

    def size(self) -> TextSize:
        """Return the figures of everything that was added."""
        return TextSize(self._num_bytes, 1 + self._num_runs, self._has_crlf, self._has_bom)

    def _add_runs(self, num_runs: int, begins_in_space: bool, ends_in_space: bool) -> None:
        # A run over the seam of two parts is one run.
        self._num_runs += num_runs - (begins_in_space and self._ends_in_space)
        self._ends_in_space = ends_in_space

    def _add_spaces(self, text: str) -> None:
        # Spaces at the ends do not count, and which are at the end is known only when text follows.
        text = text if self._has_text else text.lstrip()
        core = text.rstrip()
        if core:
            self._num_runs += self._open_spaces + core.count(" ")
            self._open_spaces = 0
            self._has_text = True
        self._open_spaces += text.count(" ", len(core))


def count_words(text: str, separator: str = "white_space") -> int:
    """Count the words of a text; see ``TextCounter``."""
    counter = TextCounter(separator)
    counter.add(text)
    return counter.size().num_words
