"""Bytes and words of the text that a plan covers: what per-byte and per-word figures divide by."""

import numpy as np

from ppl_eval.plan import Plan
from ppl_eval.tokenizer import TextEncoder
from ppl_eval.tokens import TokenData, count_words


def covered_text(plan: Plan, data: TokenData, encoder: TextEncoder) -> tuple[int, int] | tuple[None, None]:
    """UTF-8 bytes and words of the text from the head of the first document to the last scored token.

    Whole documents count as the original text was counted. Where the plan leaves the end of a document
    unscored (a dropped tail, ``max_windows``), the shorter of the two sides is decoded and measured.

    Returns:
        Bytes and words; None where the protocol leaves out text in between.
    """
    if not plan.protocol.covers_text:
        return None, None
    last = plan.windows(plan.num_windows - 1, plan.num_windows)
    document, stop = int(last.document[0]), int(last.stop[0])
    num_bytes = int(np.sum(data.num_bytes_D[:document]))
    num_words = int(np.sum(data.num_words_D[:document]))
    begin, end = int(data.offsets_D1[document]), int(data.offsets_D1[document + 1])
    all_bytes, all_words = int(data.num_bytes_D[document]), int(data.num_words_D[document])
    separator = plan.protocol.word_separator
    num_bos = len(data.fingerprint["bos_tokens"])
    if begin + stop == end:
        return num_bytes + all_bytes, num_words + all_words
    if stop < (end - begin) / 2:
        kept = encoder.decode(data.tokens[begin + num_bos : begin + stop].tolist())
        return num_bytes + len(kept.encode()), num_words + count_words(kept, separator)
    left_out = encoder.decode(data.tokens[begin + stop : end].tolist())
    fewer = len(left_out.split()) if separator == "white_space" else left_out.count(" ")
    return num_bytes + all_bytes - len(left_out.encode()), num_words + all_words - fewer
