"""Bytes and words of the text that a plan covers: what per-byte and per-word figures divide by.

A window covers the text of its document from where the window before it ends to its own end. So every text is
counted once, however windows are divided, and the sizes of any parts of a plan add up to those of the whole.
Sizes are counted on the text itself, by the bytes that each token stands for (``text_spans``), never by
decoding tokens.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols.base import IntArray
from ppl_eval.protocols.plan import Plan

# Values summed together: some MB, however long the stream.
_CHUNK = 1 << 20


class CoveredText(NamedTuple):
    """The text that the windows of each document cover.

    Attributes:
        num_bytes_D: UTF-8 bytes; int64 [documents in the plan].
        num_words_D: words, counted as the protocol's reference does; int64.
        of: which text was counted, for the result.
    """

    num_bytes_D: IntArray
    num_words_D: IntArray
    of: str


def covered_text(plan: Plan, data: TokenData, excluded_W: IntArray | None = None) -> CoveredText | None:
    """Return bytes and words of each document, from its head to its last scored token.

    A document that is covered to its end counts as its original text was counted, one without a window as
    nothing. Of one with windows that are left out, the tokenised text that its other windows cover counts.

    Args:
        plan: the plan.
        data: its tokens.
        excluded_W: ids of the windows that are left out, ascending; None for none.

    Returns:
        None where the protocol leaves out text in between, or the text is not known (token files, a tokenizer
        that cannot say which text its tokens stand for).
    """
    if not plan.protocol.covers_text or data.num_bytes_D is None or data.num_words_D is None:
        return None
    if excluded_W is None:
        excluded_W = np.zeros(0, dtype=np.int64)
    num_windows_D = plan.windows_per_document()
    excluded_document_W = plan.locate(excluded_W).document
    num_excluded_D = np.bincount(excluded_document_W, minlength=len(num_windows_D))
    # Of a document that is left out whole, nothing need be known.
    num_windows_D[num_windows_D == num_excluded_D] = 0
    num_bytes_D = np.where(num_windows_D > 0, data.num_bytes_D[: len(num_windows_D)], 0)
    num_words_D = np.where(num_windows_D > 0, data.num_words_D[: len(num_windows_D)], 0)
    document_K = np.flatnonzero(num_windows_D)
    stop_K = plan.protocol.locate(plan.length_D[document_K], num_windows_D[document_K] - 1)[2]
    is_cut_K = stop_K < plan.length_D[document_K]
    has_gaps_K = num_excluded_D[document_K] > 0
    is_counted_K = is_cut_K | has_gaps_K
    if is_counted_K.any():
        if data.token_bytes is None or data.token_words is None:
            return None
        counted_K = document_K[is_counted_K]
        begin_K = np.asarray(data.offsets_D1[counted_K])
        end_K = begin_K + stop_K[is_counted_K]
        num_bytes_D[counted_K] = sums_between(data.token_bytes, begin_K, end_K)
        num_words_D[counted_K] = 1 + sums_between(data.token_words, begin_K, end_K)
        if has_gaps_K.any():
            partly_W = num_windows_D[excluded_document_W] > 0
            _subtract(plan, data, excluded_W[partly_W], num_bytes_D, num_words_D)
    if data.labels is not None:
        of = "scored parts of samples"
    elif data.fingerprint["join"] is not None:
        of = "documents and the joins between them"
    else:
        of = "original documents" + ("; of one that is cut the tokenised text" if is_cut_K.any() else "")
    if has_gaps_K.any():
        of += "; of one with excluded windows the tokenised text of the others"
    return CoveredText(num_bytes_D, num_words_D, of)


def _subtract(
    plan: Plan, data: TokenData, excluded_W: IntArray, num_bytes_D: IntArray, num_words_D: IntArray
) -> None:
    """Take away what windows cover, neighbours together."""
    for run_W in np.split(excluded_W, 1 + np.flatnonzero(np.diff(excluded_W) != 1)):
        sizes = window_sizes(plan, data, int(run_W[0]), int(run_W[-1]) + 1)
        assert sizes is not None
        document_W = plan.locate(run_W).document
        np.subtract.at(num_bytes_D, document_W, sizes[0])
        np.subtract.at(num_words_D, document_W, sizes[1])


def window_sizes(plan: Plan, data: TokenData, first: int, last: int) -> tuple[IntArray, IntArray] | None:
    """Return bytes and words of the text that each of the windows [first, last) covers; int64.

    The first window of a document has the word more that a text has than places where words begin.

    Returns:
        None where ``covered_text`` has none, or the tokenizer cannot say which text its tokens stand for.
    """
    if not plan.protocol.covers_text or data.token_bytes is None or data.token_words is None:
        return None
    windows = plan.windows(max(first - 1, 0), last)
    follows = np.concatenate([[False], windows.document[1:] == windows.document[:-1]])
    begin = np.where(follows, np.concatenate([[0], windows.stop[:-1]]), 0)
    offset = np.asarray(data.offsets_D1[windows.document])
    here = slice(len(windows.stop) - (last - first), None)
    begin_W, end_W = (offset + begin)[here], (offset + windows.stop)[here]
    words_W = sums_between(data.token_words, begin_W, end_W)
    return sums_between(data.token_bytes, begin_W, end_W), words_W + (begin[here] == 0)


def sums_between(values: npt.NDArray[Any], begin_K: IntArray, end_K: IntArray) -> IntArray:
    """Sum runs of values, [begin, end) each; runs ascend and do not overlap.

    Example:
        >>> sums_between(np.array([1, 2, 3, 4]), np.array([0, 2]), np.array([2, 3])).tolist()
        [3, 3]
    """
    sums_K = np.zeros(len(begin_K), dtype=np.int64)
    first = 0
    while first < len(begin_K):
        low = int(begin_K[first])
        last = max(first + 1, int(np.searchsorted(end_K, low + _CHUNK, side="right")))
        if last == first + 1:
            for start in range(low, int(end_K[first]), _CHUNK):
                stop = min(start + _CHUNK, int(end_K[first]))
                sums_K[first] += values[start:stop].sum(dtype=np.int64)
        else:
            running = np.concatenate([[0], np.cumsum(values[low : int(end_K[last - 1])], dtype=np.int64)])
            sums_K[first:last] = running[end_K[first:last] - low] - running[begin_K[first:last] - low]
        first = last
    return sums_K
