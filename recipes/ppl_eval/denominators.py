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
        if stop < length_D[document] / 2:
            begin = int(data.offsets_D1[document])
            kept = encoder.decode(data.tokens[begin + num_bos : begin + stop].tolist())
            num_bytes_D[document], num_words_D[document] = len(kept.encode()), count_words(kept, separator)
        else:
            end = int(data.offsets_D1[document + 1])
            left_out = encoder.decode(data.tokens[end - length_D[document] + stop : end].tolist())
            num_bytes_D[document] -= len(left_out.encode())
            num_words_D[document] -= (
                len(left_out.split()) if separator == "white_space" else left_out.count(" ")
            )
    return CoveredText(num_bytes_D, num_words_D)
