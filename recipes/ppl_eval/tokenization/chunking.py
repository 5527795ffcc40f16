"""A long text tokenised in pieces, with the ids that one call would give.

Why that is possible. A byte-pair encoding is the only one of its text in which every pair of neighbouring
tokens is what the two encode to together (the property that GitHub's ``bpe`` crate is built on). So two
encodings may be joined where the pair at the seam has been seen side by side in a genuine encoding. A
pre-tokenizer that scans from left to right and remembers nothing at a boundary can likewise be started at
one.

How it is done. A piece is encoded behind the text before it (its context), and the context's ids are taken
off again. The seam holds if

1. the context encodes to the same ids whether the piece follows or not, so a token ends exactly at the cut
   with the true text on both sides, and
2. the ids before the cut, encoded as part of the context, are those that end the piece before, so its left
   side is in step with the text's head.

A cut is tried before it is made, and checked again when the pieces are joined. Text that offers no good cut
makes a longer piece; in the worst case the piece is the whole text, which is the one call.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from ppl_eval.tokenization.encoders import Encode, Encoding, Ids

PIECE_CHARS = 1 << 18
# Characters of true text around a cut that is tried, and before a piece.
CONTEXT_CHARS = 400
_LONG_CONTEXT_CHARS = 2 * CONTEXT_CHARS + 1
# Ids compared at a seam. One would do for byte-pair encodings.
SEAM_IDS = 8
_TRIES = 24
# Where cuts are likely to hold, best first: a line's first letter, a word's space, any change of character.
_LIKELY = (re.compile(r"(?<=\n)(?=\w)"), re.compile(r"(?<=\S)(?= \w)"), re.compile(r"(?s)(?<=(.))(?!\1)"))


class SeamError(Exception):
    """Two pieces do not fit together: the text must be encoded in one call."""


class Piece(NamedTuple):
    """A piece of one stream of text.

    Attributes:
        stream: index of the stream.
        text: what is to be encoded.
        context: the text just before it, encoded along and taken off again; empty where the tokenizer needs
            none.
        is_first: whether it begins its stream.
        is_last: whether it ends its stream.
    """

    stream: int
    text: str
    context: str
    is_first: bool
    is_last: bool


class EncodedPiece(NamedTuple):
    """Ids of a piece, and the last ids of its context."""

    stream: int
    ids: Ids
    seam: Ids
    is_first: bool
    is_last: bool


@dataclass
class _Pending:
    """Text of a stream that is not cut yet."""

    parts: list[str] = field(default_factory=list)
    num_chars: int = 0
    # The end of what is cut already.
    before: str = ""
    is_first: bool = True
    # Length at which the next cut is tried.
    target: int = 0

    def text(self) -> str:
        """All of it, as one string."""
        self.parts = ["".join(self.parts)]
        return self.parts[0]

    def piece(self, stream: int, text: str, is_last: bool) -> Piece:
        """A piece of it, with its context."""
        return Piece(stream, text, self.before[-CONTEXT_CHARS:], self.is_first, is_last)


def cut(
    parts: Iterable[tuple[int, str, bool]], encoding: Encoding, piece_chars: int = PIECE_CHARS
) -> Iterator[Piece]:
    """Cut streams of text into pieces.

    Args:
        parts: ``(stream, text, is_last)``; the parts of several streams may come mixed, and a stream's last
            part says so.
        encoding: the tokenizer's.
        piece_chars: characters of a piece, about; long where a text offers no cut.
    """
    piece_chars = encoding.cut_every or piece_chars
    ahead = 0 if encoding.cut_every else CONTEXT_CHARS
    pending: dict[int, _Pending] = {}
    for stream, text, is_last in _in_slices(parts, 4 * piece_chars):
        rest = pending.setdefault(stream, _Pending(target=piece_chars))
        rest.parts.append(text)
        rest.num_chars += len(text)
        while rest.num_chars > rest.target + ahead and not encoding.one_call:
            whole = rest.text()
            at = encoding.cut_every or _find_cut(rest.before, whole, rest.target, encoding.encode)
            if at is None:
                # Twice as far on, so that the work on a text without cuts stays linear.
                rest.target *= 2
                continue
            yield rest.piece(stream, whole[:at], False)
            before = "" if encoding.cut_every else _last(rest.before, whole[:at], _LONG_CONTEXT_CHARS)
            rest = _Pending([whole[at:]], len(whole) - at, before, False, piece_chars)
            pending[stream] = rest
        if is_last:
            yield rest.piece(stream, rest.text(), True)
            del pending[stream]


def _in_slices(parts: Iterable[tuple[int, str, bool]], chars: int) -> Iterator[tuple[int, str, bool]]:
    # What is left of a text is copied at each cut; a document that comes as one string must not be copied a
    # thousand times.
    for stream, text, is_last in parts:
        for begin in range(0, len(text) or 1, chars):
            yield stream, text[begin : begin + chars], is_last and begin + chars >= len(text)


def group(pieces: Iterable[Piece], chars: int = PIECE_CHARS) -> Iterator[list[Piece]]:
    """Pieces in lists of about so many characters: what a worker gets at once."""
    together: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        together.append(piece)
        num_chars += len(piece.text)
        if num_chars >= chars:
            yield together
            together, num_chars = [], 0
    if together:
        yield together


def encode_pieces(encode: Encode, pieces: list[Piece]) -> list[EncodedPiece]:
    """Encode pieces behind their contexts.

    Raises:
        SeamError: if a context's ids change when its piece follows.
    """
    encoded = []
    for piece in pieces:
        before = encode(piece.context) if piece.context else np.zeros(0, dtype=np.int64)
        ids = encode(piece.context + piece.text)
        if not np.array_equal(ids[: len(before)], before):
            raise SeamError
        seam = before[-SEAM_IDS:]
        encoded.append(EncodedPiece(piece.stream, ids[len(before) :], seam, piece.is_first, piece.is_last))
    return encoded


def checked(encoded: Iterable[EncodedPiece]) -> Iterator[EncodedPiece]:
    """Pass on encoded pieces whose seams hold.

    Raises:
        SeamError: if a piece's context does not end with the ids of the piece before.
    """
    tails: dict[int, Ids] = {}
    for piece in encoded:
        tail = tails.pop(piece.stream, np.zeros(0, dtype=np.int64))
        compared = min(len(tail), len(piece.seam))
        if compared and not np.array_equal(tail[-compared:], piece.seam[-compared:]):
            raise SeamError
        if not piece.is_last:
            tails[piece.stream] = np.concatenate([tail, piece.ids[-SEAM_IDS:]])[-SEAM_IDS:]
        yield piece


def _find_cut(before: str, text: str, begin: int, encode: Encode) -> int | None:
    """A position at or after ``begin`` where a seam should hold, with ``CONTEXT_CHARS`` of text behind it;
    None if none is found.
    """
    end = len(text) - CONTEXT_CHARS
    for likely in _LIKELY:
        for match in islice(likely.finditer(text, begin, end), _TRIES):
            at = match.start()
            if _seam_holds(
                _last(before, text[max(0, at - _LONG_CONTEXT_CHARS) : at], _LONG_CONTEXT_CHARS),
                text[at : at + CONTEXT_CHARS],
                encode,
            ):
                return at
    return None


def _last(before: str, text: str, chars: int) -> str:
    # Without joining the two where the second is long.
    return text[-chars:] if len(text) >= chars else (before + text)[-chars:]


def _seam_holds(before: str, after: str, encode: Encode) -> bool:
    context = before[-CONTEXT_CHARS:]
    ids = encode(context)
    if not np.array_equal(encode(context + after)[: len(ids)], ids):
        return False
    # The same with a longer context: it shows whether the ids here depend on where the context begins.
    longer = encode(before)
    compared = min(SEAM_IDS, len(ids), len(longer))
    return compared > 0 and np.array_equal(longer[-compared:], ids[-compared:])
