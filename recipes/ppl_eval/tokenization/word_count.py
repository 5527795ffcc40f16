"""Bytes and words of a text that comes in parts, counted as the reference tools count them."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    """Count the words of a text; see ``TextCounter``.

    Example:
        >>> count_words(" one  two "), count_words(" one  two ", "space")
        (4, 3)
    """
    counter = TextCounter(separator)
    counter.add(text)
    return counter.size().num_words


class WordState(NamedTuple):
    """What the words of a text depend on before it: the end of the text that came earlier.

    Attributes:
        in_space: whether it ends in white space.
        open_spaces: spaces in the white space at its end.
        has_text: whether anything but white space came.
    """

    in_space: bool = False
    open_spaces: int = 0
    has_text: bool = False

    def after(self, text: str) -> "WordState":
        """Return the state behind a further part of the text."""
        if not text:
            return self
        core = len(text.rstrip())
        open_spaces = text.count(" ", core)
        if not core:
            return WordState(True, self.open_spaces + open_spaces, self.has_text)
        return WordState(core < len(text), open_spaces, True)


START = WordState()


def word_starts(text: str, separator: str, before: WordState) -> npt.NDArray[np.int64]:
    """Return where the word count goes up, as byte offsets: a text has one word more than it has such places.

    By ``white_space`` that is where a run of white space begins; by ``space`` the first letter behind spaces,
    once for each of them.

    Args:
        text: the text, or a part of it.
        separator: what parts words, one of ``SEPARATORS``.
        before: the state behind the parts before it.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    is_space = _IS_SPACE[np.minimum(codes, _LAST_SPACE + 1)]
    if separator == "white_space":
        starts = np.flatnonzero(is_space & ~np.concatenate([[before.in_space], is_space[:-1]]))
    else:
        letters = np.flatnonzero(~is_space)
        spaces = np.cumsum(codes == ord(" "))[letters]
        more = np.diff(spaces, prepend=-before.open_spaces)
        if len(more) and not before.has_text:
            more[0] = 0
        starts = np.repeat(letters, more)
    if text.isascii():
        return starts
    widths = utf8_widths(codes)
    return (np.cumsum(widths) - widths)[starts]


def utf8_widths(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return the UTF-8 bytes of each of these characters."""
    return 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
