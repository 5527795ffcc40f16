"""A long text tokenised in chunks, with the ids that one call would give.

Why that is possible. A byte-pair encoding is the only one of its text in which every pair of neighbouring
tokens is what the two encode to together (the property that GitHub's ``bpe`` crate is built on). So two
encodings may be joined where the pair at the seam has been seen side by side in a genuine encoding. A
pre-tokenizer that scans from left to right and remembers nothing at a boundary can likewise be started at
one.

How it is done. A chunk is encoded behind the text before it (its context), and the context's ids are taken
off again. The seam holds if

1. the context encodes to the same ids whether the chunk follows or not, so a token ends exactly at the cut
   with the true text on both sides, and
2. the ids before the cut, encoded as part of the context, are those that end the chunk before, so its left
   side is in step with the text's head.

A cut is tried before it is made, and checked again when the chunks are joined. Text that offers no good cut
makes a longer chunk; in the worst case the chunk is the whole text, which is the one call.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from ppl_eval.tokenization.encoders import Encode, Encoding, Ids
from ppl_eval.tokenization.text_spans import Measure
from ppl_eval.tokenization.word_count import START, WordState

CHUNK_CHARS = 1 << 18
# Characters of true text around a cut that is tried, and before a chunk.
CONTEXT_CHARS = 400
_LONG_CONTEXT_CHARS = 2 * CONTEXT_CHARS + 1
# Ids compared at a seam. One would do for byte-pair encodings.
SEAM_IDS = 8
_TRIES = 24
# Where cuts are likely to hold, best first: a line's first letter, a word's space, any change of character.
_LIKELY = (re.compile(r"(?<=\n)(?=\w)"), re.compile(r"(?<=\S)(?= \w)"), re.compile(r"(?s)(?<=(.))(?!\1)"))


class SeamError(Exception):
    """Two chunks do not fit together: the text must be encoded in one call."""


class Chunk(NamedTuple):
    """A chunk of one stream of text.

    Attributes:
        stream: index of the stream.
        text: what is to be encoded.
        context: the text just before it, encoded along and taken off again; empty where the tokenizer needs
            none.
        is_first: whether it begins its stream.
        is_last: whether it ends its stream.
        before: the state of the words behind the stream's text before it.
    """

    stream: int
    text: str
    context: str
    is_first: bool
    is_last: bool
    before: WordState = START


class EncodedChunk(NamedTuple):
    """Ids of a chunk, and the last ids of its context.

    Attributes:
        sizes: bytes and words of each token (``Measure.sizes``); None where they are not measured.
    """

    stream: int
    ids: Ids
    seam: Ids
    is_first: bool
    is_last: bool
    sizes: Ids | None = None


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
    words: WordState = START

    def text(self) -> str:
        """Return all of it, as one string."""
        self.parts = ["".join(self.parts)]
        return self.parts[0]

    def chunk(self, stream: int, text: str, is_last: bool) -> Chunk:
        """Return a chunk of it, with its context."""
        return Chunk(stream, text, self.before[-CONTEXT_CHARS:], self.is_first, is_last, self.words)


def cut(
    parts: Iterable[tuple[int, str, bool]], encoding: Encoding, chunk_chars: int = CHUNK_CHARS
) -> Iterator[Chunk]:
    """Cut streams of text into chunks.

    Args:
        parts: ``(stream, text, is_last)``; the parts of several streams may come mixed, and a stream's last
            part says so.
        encoding: the tokenizer's.
        chunk_chars: characters of a chunk, about; long where a text offers no cut.
    """
    chunk_chars = encoding.cut_every or chunk_chars
    ahead = 0 if encoding.cut_every else CONTEXT_CHARS
    pending: dict[int, _Pending] = {}
    for stream, text, is_last in _in_slices(parts, 4 * chunk_chars):
        rest = pending.setdefault(stream, _Pending(target=chunk_chars))
        rest.parts.append(text)
        rest.num_chars += len(text)
        while rest.num_chars > rest.target + ahead and not encoding.one_call:
            whole = rest.text()
            at = encoding.cut_every or _find_cut(rest.before, whole, rest.target, encoding.encode)
            if at is None:
                # Twice as far on, so that the work on a text without cuts stays linear.
                rest.target *= 2
                continue
            yield rest.chunk(stream, whole[:at], False)
            before = "" if encoding.cut_every else _last(rest.before, whole[:at], _LONG_CONTEXT_CHARS)
            words = rest.words.after(whole[:at])
            rest = _Pending([whole[at:]], len(whole) - at, before, False, chunk_chars, words)
            pending[stream] = rest
        if is_last:
            yield rest.chunk(stream, rest.text(), True)
            del pending[stream]


def _in_slices(parts: Iterable[tuple[int, str, bool]], chars: int) -> Iterator[tuple[int, str, bool]]:
    # What is left of a text is copied at each cut; a document that comes as one string must not be copied a
    # thousand times.
    for stream, text, is_last in parts:
        for begin in range(0, len(text) or 1, chars):
            yield stream, text[begin : begin + chars], is_last and begin + chars >= len(text)


def group(chunks: Iterable[Chunk], chars: int = CHUNK_CHARS) -> Iterator[list[Chunk]]:
    """Yield chunks in lists of about ``chars`` characters: what a worker gets at once."""
    together: list[Chunk] = []
    num_chars = 0
    for chunk in chunks:
        together.append(chunk)
        num_chars += len(chunk.text)
        if num_chars >= chars:
            yield together
            together, num_chars = [], 0
    if together:
        yield together


def encode_chunks(encode: Encode, chunks: list[Chunk], measure: Measure | None = None) -> list[EncodedChunk]:
    """Encode chunks behind their contexts.

    Args:
        encode: the tokenizer's.
        chunks: what to encode.
        measure: counts bytes and words of the tokens; None leaves that out.

    Raises:
        SeamError: if a context's ids change when its chunk follows.
    """
    encoded = []
    for chunk in chunks:
        before = encode(chunk.context) if chunk.context else np.zeros(0, dtype=np.int64)
        ids = encode(chunk.context + chunk.text)
        if not np.array_equal(ids[: len(before)], before):
            raise SeamError
        seam, ids = before[-SEAM_IDS:], ids[len(before) :]
        sizes = None
        if measure is not None:
            sizes = measure.sizes(ids, len(before), chunk.context, chunk.text, chunk.before)
        encoded.append(EncodedChunk(chunk.stream, ids, seam, chunk.is_first, chunk.is_last, sizes))
    return encoded


def checked(encoded: Iterable[EncodedChunk]) -> Iterator[EncodedChunk]:
    """Pass on encoded chunks whose seams hold.

    Raises:
        SeamError: if a chunk's context does not end with the ids of the chunk before.
    """
    tails: dict[int, Ids] = {}
    for chunk in encoded:
        tail = tails.pop(chunk.stream, np.zeros(0, dtype=np.int64))
        compared = min(len(tail), len(chunk.seam))
        if compared and not np.array_equal(tail[-compared:], chunk.seam[-compared:]):
            raise SeamError
        if not chunk.is_last:
            tails[chunk.stream] = np.concatenate([tail, chunk.ids[-SEAM_IDS:]])[-SEAM_IDS:]
        yield chunk


def _find_cut(before: str, text: str, begin: int, encode: Encode) -> int | None:
    """Find a position at or after ``begin`` where a seam should hold, with ``CONTEXT_CHARS`` of text behind
    it; None if there is none.
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
