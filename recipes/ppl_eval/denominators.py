"""Bytes and words of the text that a plan covers: what per-byte and per-word figures divide by."""

from typing import NamedTuple

import numpy as np

from ppl_eval.plan import Plan
from ppl_eval.tokenizer import TextEncoder
from ppl_eval.tokens import TokenData, count_words
from ppl_eval.windows import IntArray


class CoveredText(NamedTuple):
    """The text that the scored windows of each document cover.

    Attributes:
        num_bytes_D: UTF-8 bytes of the original text; int64 [documents in the plan].
        num_words_D: words, counted as the protocol's reference does; int64.
    """

    num_bytes_D: IntArray
    num_words_D: IntArray


def covered_text(plan: Plan, data: TokenData, encoder: TextEncoder) -> CoveredText | None:
    """Bytes and words of each document, from its head to its last scored token.

    Whole documents count as the original text was counted, documents without a window as nothing. Where the
    end of a document is not scored (a dropped tail, ``max_windows``), the shorter of the two sides is decoded
    and measured.

    Returns:
        None where the protocol leaves out text in between.
    """
    if not plan.protocol.covers_text:
        return None
    num_windows_D = plan.windows_per_document()
    num_documents = len(num_windows_D)
    num_bytes_D = np.where(num_windows_D > 0, data.num_bytes_D[:num_documents], 0)
    num_words_D = np.where(num_windows_D > 0, data.num_words_D[:num_documents], 0)
    document_K = np.flatnonzero(num_windows_D)
    length_K = plan.length_D[document_K]
    stop_K = plan.protocol.locate(length_K, num_windows_D[document_K] - 1)[2]
    for document, stop in zip(document_K[stop_K < length_K], stop_K[stop_K < length_K], strict=True):
        num_bytes, num_words = _head(data, encoder, int(document), int(stop), plan.protocol.word_separator)
        num_bytes_D[document], num_words_D[document] = num_bytes, num_words
    return CoveredText(num_bytes_D, num_words_D)


def _head(data: TokenData, encoder: TextEncoder, document: int, stop: int, separator: str) -> tuple[int, int]:
    begin, end = int(data.offsets_D1[document]), int(data.offsets_D1[document + 1])
    if stop < (end - begin) / 2:
        num_bos = len(data.fingerprint["bos_tokens"])
        kept = encoder.decode(data.tokens[begin + num_bos : begin + stop].tolist())
        return len(kept.encode()), count_words(kept, separator)
    left_out = encoder.decode(data.tokens[begin + stop : end].tolist())
    fewer = len(left_out.split()) if separator == "white_space" else left_out.count(" ")
    num_bytes, num_words = int(data.num_bytes_D[document]), int(data.num_words_D[document])
    return num_bytes - len(left_out.encode()), num_words - fewer
