"""Bytes and words of the text that a plan covers: what per-byte and per-word figures divide by."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols.base import IntArray
from ppl_eval.protocols.plan import Plan
from ppl_eval.tokenization.tokenizer import TextEncoder
from ppl_eval.tokenization.word_count import TextCounter, TextSize

_TOKENS_OF_A_CHARACTER = 8


class CoveredText(NamedTuple):
    """The text that the scored windows of each document cover.

    Attributes:
        num_bytes_D: UTF-8 bytes of the original text; int64 [documents in the plan].
        num_words_D: words, counted as the protocol's reference does; int64.
    """

    num_bytes_D: IntArray
    num_words_D: IntArray


def covered_text(plan: Plan, data: TokenData, encoder: TextEncoder) -> CoveredText | None:
    """Return the bytes and words of each document, from its head to its last scored token.

    Whole documents count as the original text was counted, documents without a window as nothing. Where the
    end of a document is not scored (a dropped tail, ``max_windows``), the shorter of the two sides is decoded
    and measured.

    Returns:
        None where the protocol leaves out text in between, or there is no text (token files, samples).
    """
    if not plan.protocol.covers_text or data.num_bytes_D is None or data.num_words_D is None:
        return None
    separator, num_bos = plan.protocol.word_separator, len(data.fingerprint["bos_tokens"])
    length_D, num_windows_D = plan.length_D, plan.windows_per_document()
    num_documents = len(num_windows_D)
    num_bytes_D = np.where(num_windows_D > 0, data.num_bytes_D[:num_documents], 0)
    num_words_D = np.where(num_windows_D > 0, data.num_words_D[:num_documents], 0)
    document_K = np.flatnonzero(num_windows_D)
    length_K = length_D[document_K]
    stop_K = plan.protocol.locate(length_K, num_windows_D[document_K] - 1)[2]
    for document, stop in zip(document_K[stop_K < length_K], stop_K[stop_K < length_K], strict=True):
        end = int(data.offsets_D1[document + 1])
        begin = end - int(length_D[document])
        if stop < length_D[document] / 2:
            size = decoded_size(encoder, data.tokens[begin + num_bos : begin + stop], separator)
            num_bytes_D[document], num_words_D[document] = size.num_bytes, size.num_words
        else:
            size = decoded_size(encoder, data.tokens[begin + stop : end], separator)
            num_bytes_D[document] -= size.num_bytes
            # The text that stays ends where this one begins: what parts words here goes, the word in the cut
            # stays.
            num_words_D[document] -= size.num_words - 1
    return CoveredText(num_bytes_D, num_words_D)


def decoded_size(
    encoder: TextEncoder, tokens: npt.NDArray[Any], separator: str, tokens_at_once: int = 1 << 16
) -> TextSize:
    """Measure the text of tokens, decoded in parts so that memory stays flat."""
    counter = TextCounter(separator)
    start = 0
    while start < len(tokens):
        # A character may be spread over tokens, and a part must not end inside one.
        for stop in range(start + tokens_at_once, start + tokens_at_once + _TOKENS_OF_A_CHARACTER):
            text = encoder.decode(tokens[start:stop].tolist())
            if not text.endswith("\ufffd") or stop >= len(tokens):
                break
        counter.add(text)
        start = stop
    return counter.size()
