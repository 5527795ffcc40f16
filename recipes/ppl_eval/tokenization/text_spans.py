"""Which bytes of a text each token stands for, and where its words begin.

Every byte of a text belongs to exactly one of its tokens, so byte counts of any parts of a text add up to the
whole. A token that is a part of a character has the bytes it has. Text that a tokenizer drops (white space at
an end, for example) belongs to the next token, or at the end of a text to the last.

Two ways lead there. The ids alone say it where a token always stands for the same bytes (``id_bytes``); that
is checked against the size of the text, and where it fails (a normaliser changed the text, a token stands for
anything unknown) the tokenizer's own spans are used.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.tokenization.word_count import WordState, utf8_widths, word_starts

IntArray = npt.NDArray[np.int64]
Spans = Callable[[str], tuple[IntArray, IntArray]]
# Names and ids of special tokens.
SpecialTokens = tuple[tuple[str, int], ...]

# SentencePiece writes a space as this letter, and a byte without a token of its own as <0x00> to <0xFF>.
_SPACE = "\u2581"
_UNKNOWN = -1


@dataclass(frozen=True)
class TextSpans:
    """What a tokenizer says about the text of its tokens; picklable.

    Attributes:
        id_bytes: UTF-8 bytes that each id stands for, -1 where that depends on the text; int64 [ids].
        marks_start: ids that begin with a space which a tokenizer may have put before a text; bool [ids].
        spans: text to the byte offsets where its tokens begin and end; None where the tokenizer cannot say.
    """

    id_bytes: IntArray
    marks_start: npt.NDArray[np.bool_]
    spans: Spans | None = None


@dataclass(frozen=True)
class Measure:
    """Counts bytes and words of each token of a chunk; picklable.

    Attributes:
        spans: of the tokenizer.
        separator: what parts words, see ``word_count``.
    """

    spans: TextSpans
    separator: str

    def sizes(
        self, ids: IntArray, num_context: int, context: str, text: str, before: WordState
    ) -> IntArray | None:
        """Return bytes of each token, and how many words begin in it behind the text's first.

        Args:
            ids: tokens of the text; without those of its context.
            num_context: tokens of the context.
            context: the text before it that was encoded along.
            text: the text.
            before: the state of the words behind all text before.

        Returns:
            int64 [2, tokens + 1], where the last column is text without any token; None where the tokenizer
            cannot say.
        """
        num_bytes = token_bytes(self.spans, ids, context, text, num_context)
        if num_bytes is None:
            return None
        num_bytes = np.append(num_bytes, 0 if len(ids) else len(text.encode()))
        starts = word_starts(text, self.separator, before)
        token = np.searchsorted(np.cumsum(num_bytes), starts, side="right")
        return np.stack([num_bytes, np.bincount(token, minlength=len(num_bytes))])


def token_bytes(
    known: TextSpans, ids: IntArray, context: str, text: str, num_context: int
) -> IntArray | None:
    """Count the bytes of each token of a text that was encoded behind a context.

    Args:
        known: of the tokenizer.
        ids: tokens of the text; without those of the context.
        context: the text before it.
        text: the text.
        num_context: tokens of the context.

    Returns:
        int64 [tokens], which add up to the bytes of ``text``; None where the tokenizer cannot say.
    """
    num_bytes = len(text.encode())
    if len(ids) == 0:
        return np.zeros(0, dtype=np.int64)
    lengths = known.id_bytes[ids]
    if (lengths >= 0).all():
        added = int(lengths.sum()) - num_bytes
        if added == 0:
            return lengths
        if added == 1 and num_context == 0 and known.marks_start[ids[0]]:
            lengths[0] -= 1
            return lengths
    if known.spans is None:
        return None
    begins, ends = known.spans(context + text)
    if len(ends) != num_context + len(ids):
        return None
    base = len(context.encode())
    ends = np.maximum.accumulate(np.maximum(ends[num_context:], base))
    _share_characters(begins[num_context:], ends, lengths, base)
    ends[-1] = base + num_bytes
    return np.diff(ends, prepend=base)


def _share_characters(begins: IntArray, ends: IntArray, lengths: IntArray, base: int) -> None:
    """Give tokens that are parts of one character the bytes that they have, where these are known.

    Such tokens begin at the same place, and one of them spans the character. Changes ``ends``.
    """
    bounds = np.flatnonzero(np.diff(begins)) + 1
    for first, stop in zip([0, *bounds], [*bounds, len(begins)], strict=True):
        if stop - first == 1:
            continue
        start = base if first == 0 else int(ends[first - 1])
        parts = lengths[first:stop]
        if (parts >= 0).all() and parts.sum() == ends[stop - 1] - start:
            ends[first:stop] = start + np.cumsum(parts)


def split_special(special: SpecialTokens, text: str) -> list[str]:
    """Split a text at names of special tokens: every second part is one of them, and some are empty."""
    return _pattern(special).split(text)


@lru_cache(maxsize=4)
def _pattern(special: SpecialTokens) -> re.Pattern[str]:
    # Of two names that begin alike the longer one is meant.
    names = sorted((name for name, _ in special), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names))})")


def spans_of_hf(tokenizer: Any, description: dict[str, Any], spell: bool = False) -> TextSpans:
    """Return what a ``tokenizers.Tokenizer`` knows; ``description`` is its tokenizer.json."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    is_byte_level = _has(description.get("pre_tokenizer"), "ByteLevel") or _has(
        description.get("decoder"), "ByteLevel"
    )

    def size(token: str) -> int:
        if description["model"].get("byte_fallback") and _is_byte(token):
            return 1
        if token in added:
            return len(token.encode())
        return len(token) if is_byte_level else _piece_bytes(token)

    pieces = {token: size(token) for token in vocab}
    unknown = description["model"].get("unk_token")
    if unknown in pieces:
        pieces[unknown] = _UNKNOWN
    return _table(((vocab[token], token, size) for token, size in pieces.items()), _HFSpans(tokenizer, spell))


def spans_of_sentencepiece(processor: Any, special: SpecialTokens = ()) -> TextSpans:
    """Return what a ``SentencePieceProcessor`` knows; ``special`` are the tokens that are parsed."""
    rows = []
    for index in range(processor.get_piece_size()):
        piece = processor.id_to_piece(index)
        rows.append((index, piece, _UNKNOWN if processor.is_unknown(index) else _piece_bytes(piece)))
    rows += [(index, name, len(name.encode())) for name, index in special]
    spans = _SentencePieceSpans(processor)
    return _table(rows, _ParsedSpans(spans, special) if special else spans)


def spans_of_tiktoken(encoding: Any) -> TextSpans:
    """Return what a ``tiktoken.Encoding`` knows."""
    rows = []
    for index in range(encoding.n_vocab):
        try:
            rows.append((index, "", len(encoding.decode_single_token_bytes(index))))
        except KeyError:
            continue
    return _table(rows, None)


def spans_of_byte_level(vocab: dict[str, int], special: dict[str, int]) -> TextSpans:
    """Return what a GPT-2 style vocabulary knows, in which every letter of a token is a byte."""
    rows = [(index, token, len(token)) for token, index in vocab.items()]
    rows += [(index, token, len(token.encode())) for token, index in special.items()]
    return _table(rows, None)


@dataclass(frozen=True)
class _HFSpans:
    tokenizer: Any
    spell: bool

    def __call__(self, text: str) -> tuple[IntArray, IntArray]:
        self.tokenizer.encode_special_tokens = self.spell
        spans = np.array(self.tokenizer.encode(text, add_special_tokens=False).offsets, dtype=np.int64)
        # From characters to bytes.
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        begins, ends = np.concatenate([[0], np.cumsum(utf8_widths(codes))])[spans.reshape(-1, 2)].T
        return begins, ends


@dataclass(frozen=True)
class _SentencePieceSpans:
    processor: Any

    def __call__(self, text: str) -> tuple[IntArray, IntArray]:
        pieces = self.processor.encode(text, add_bos=False, add_eos=False, return_type="proto").pieces
        begins, ends = (
            np.array([getattr(piece, side) for piece in pieces], dtype=np.int64) for side in ("begin", "end")
        )
        return begins, ends


@dataclass(frozen=True)
class _ParsedSpans:
    spans: Spans
    special: SpecialTokens

    def __call__(self, text: str) -> tuple[IntArray, IntArray]:
        begins, ends = [], []
        base = 0
        for index, part in enumerate(split_special(self.special, text)):
            size = len(part.encode())
            own = self.spans(part) if index % 2 == 0 else (np.array([0]), np.array([size]))
            begins.append(own[0] + base)
            ends.append(own[1] + base)
            base += size
        return np.concatenate(begins), np.concatenate(ends)


def _table(rows: Any, spans: Spans | None) -> TextSpans:
    rows = list(rows)
    size = max(index for index, _, _ in rows) + 1
    id_bytes = np.full(size, _UNKNOWN, dtype=np.int64)
    marks_start = np.zeros(size, dtype=np.bool_)
    for index, token, num_bytes in rows:
        id_bytes[index] = num_bytes
        marks_start[index] = token.startswith(_SPACE)
    return TextSpans(id_bytes, marks_start, spans)


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _piece_bytes(piece: str) -> int:
    return 1 if _is_byte(piece) else len(piece.replace(_SPACE, " ").encode())


def _has(step: dict[str, Any] | None, kind: str) -> bool:
    if not step:
        return False
    parts = [*step.get("pretokenizers", []), *step.get("decoders", [])]
    return step["type"] == kind or any(_has(part, kind) for part in parts)
