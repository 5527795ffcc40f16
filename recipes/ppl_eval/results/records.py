"""What each window, and each document, scored: Parquet files, for those who want to look closer.

``windows.parquet``, one row a window, ordered by ``window_id``:

    window_id    int64    number of the window in the plan
    document     int64    number of its document (protocols that join have one document a domain)
    domain       string   the document's domain
    start        int64    first token of the document that the model saw
    score_start  int64    first token that was scored
    stop         int64    one past the last token that was scored
    prefix       bool     whether a prefix token stood before ``start``
    num_tokens   int64    scored tokens (less than stop - score_start where labels mask some)
    num_excluded int64    tokens of a window that is left out (its NLL is not finite; all else is 0), else 0
    num_correct  int64    scored tokens that were the most likely one
    nll_sum      double   their NLL, nats
    nll_sq_sum   double   sum of their squared NLL, nats^2
    num_bytes    int64    UTF-8 bytes of the text behind the window before, up to the end; null if unknown
    num_words    int64    words of it
    content      int64    hash of the tokens that the model saw and of which of them were scored

``documents.parquet``, one row a document that has a window: document, domain, num_windows (less those that
are left out), num_tokens, num_excluded (tokens that are left out), num_correct, num_bytes, num_words (null
where the protocol leaves out text), nll_sum, ce_loss, perplexity, bits_per_byte.

The values of a window are float64 that one rank computed, so the files have the same content for any number
of ranks. No file system need be shared: ranks send their rows to rank 0, some MB at a time.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.config.files import whole_file
from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics.denominators import CoveredText, window_sizes
from ppl_eval.metrics.totals import FloatSum
from ppl_eval.metrics.window_records import Records
from ppl_eval.protocols.base import IntArray, Windows, exp_or_infinity
from ppl_eval.protocols.plan import Plan

Reduce = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]

_WINDOWS_AT_ONCE = 1 << 17
_WINDOWS = pa.schema(
    [(name, pa.int64()) for name in ("window_id", "document")]
    + [("domain", pa.string())]
    + [(name, pa.int64()) for name in ("start", "score_start", "stop")]
    + [("prefix", pa.bool_())]
    + [(name, pa.int64()) for name in ("num_tokens", "num_excluded", "num_correct")]
    + [(name, pa.float64()) for name in ("nll_sum", "nll_sq_sum")]
    + [(name, pa.int64()) for name in ("num_bytes", "num_words", "content")]
)
_DOCUMENTS = pa.schema(
    [("document", pa.int64()), ("domain", pa.string())]
    + [(name, pa.int64()) for name in ("num_windows", "num_tokens", "num_excluded", "num_correct")]
    + [(name, pa.int64()) for name in ("num_bytes", "num_words")]
    + [(name, pa.float64()) for name in ("nll_sum", "ce_loss", "perplexity", "bits_per_byte")]
)


# Of a record, in the order of the fields of ``Rows``.
_SENT = ("num_tokens", "num_excluded", "num_correct", "nll_sum", "nll_sq_sum")


class Rows(NamedTuple):
    """What neighbouring windows scored."""

    windows: Windows
    first: int
    num_tokens: IntArray
    num_excluded: IntArray
    num_correct: IntArray
    nll_sum: npt.NDArray[np.float64]
    nll_sq_sum: npt.NDArray[np.float64]


def gather(
    own: Records, plan: Plan, add_over_ranks: Reduce, windows_at_once: int = _WINDOWS_AT_ONCE
) -> Iterator[Rows]:
    """Gather all windows of all ranks in order, a chunk at a time; every rank must run through it.

    A window was scored by one rank, so its row is the sum over ranks of that row and zeros, bit by bit.

    Args:
        own: what this rank scored, ordered by window.
        plan: the plan.
        add_over_ranks: sums an int64 vector over ranks.
        windows_at_once: windows in a chunk.
    """
    for first in range(0, plan.num_windows, windows_at_once):
        last = min(first + windows_at_once, plan.num_windows)
        here = own[slice(*np.searchsorted(own["window_id"], [first, last]))]
        rows = np.zeros((last - first, 1 + len(_SENT)), dtype=np.int64)
        place = here["window_id"] - first
        rows[place, 0] = 1
        for column, name in enumerate(_SENT, start=1):
            rows[place, column] = here[name].view(np.int64)
        rows = add_over_ranks(rows.ravel()).reshape(rows.shape)
        assert (rows[:, 0] == 1).all(), "a window was recorded by no rank, or by more than one"
        nll_sum, nll_sq_sum = (np.ascontiguousarray(rows[:, i]).view(np.float64) for i in (4, 5))
        num_tokens, num_excluded, num_correct = (rows[:, i] for i in (1, 2, 3))
        windows = plan.windows(first, last)
        yield Rows(windows, first, num_tokens, num_excluded, num_correct, nll_sum, nll_sq_sum)


def rounded_nll(own: Records, plan: Plan, precision: str, add_over_ranks: Reduce) -> float:
    """Return the NLL of the run as a running sum in float64 or float32 gives it, nats.

    Rounding depends on the order, so windows are added in the order of the plan, whoever scored them; every
    rank must run through it.
    """
    running = FloatSum(precision)
    for rows in gather(own, plan, add_over_ranks):
        running.add(rows.nll_sum)
    return float(running.value)


def write(
    output_dir: Path | None,
    own: Records,
    plan: Plan,
    data: TokenData,
    *,
    covered: CoveredText | None,
    add_over_ranks: Reduce,
    per_window: bool,
    per_document: bool,
    windows_at_once: int = _WINDOWS_AT_ONCE,
) -> None:
    """Gather all records and write what was asked for; all ranks take part, and one of them writes.

    Args:
        output_dir: where to write; None on ranks that don't.
        own: what this rank scored (``Ledger.own``).
        plan: the plan.
        data: its tokens.
        covered: text that each document covers, where it is known.
        add_over_ranks: sums an int64 vector over ranks.
        per_window: write ``windows.parquet``.
        per_document: write ``documents.parquet``.
        windows_at_once: windows that are sent and written together.
    """
    with ExitStack() as stack:
        windows = documents = None
        if output_dir is not None and per_window:
            windows = stack.enter_context(_whole_table(output_dir / "windows.parquet", _WINDOWS))
        if output_dir is not None and per_document:
            file = stack.enter_context(_whole_table(output_dir / "documents.parquet", _DOCUMENTS))
            documents = _Documents(file, data, covered)
        for rows in gather(own, plan, add_over_ranks, windows_at_once):
            if windows is not None:
                windows.write_table(_window_table(rows, plan, data))
            if documents is not None:
                documents.add(rows)
        if documents is not None:
            documents.flush(len(plan.length_D))


@contextmanager
def _whole_table(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    with whole_file(path, "wb") as file, pq.ParquetWriter(file, schema) as writer:
        yield writer


def _domain_names(data: TokenData, document_K: IntArray) -> pa.Array:
    index = np.zeros(len(document_K), dtype=np.int32) if data.domain_D is None else data.domain_D[document_K]
    return pa.array(np.array(data.domains, dtype=object)[index], pa.string())


def _window_table(rows: Rows, plan: Plan, data: TokenData) -> pa.Table:
    windows = rows.windows
    last = rows.first + len(windows.start)
    num_bytes, num_words = (
        window_sizes(plan, data, rows.first, last) or (pa.nulls(len(windows.start), pa.int64()),) * 2
    )
    columns: dict[str, Any] = {
        **windows._asdict(),
        "window_id": np.arange(rows.first, last),
        "domain": _domain_names(data, windows.document),
        "num_tokens": rows.num_tokens,
        "num_excluded": rows.num_excluded,
        "num_correct": rows.num_correct,
        "nll_sum": rows.nll_sum,
        "nll_sq_sum": rows.nll_sq_sum,
        "num_bytes": num_bytes,
        "num_words": num_words,
        "content": window_contents(windows, data),
    }
    return pa.table({name: columns[name] for name in _WINDOWS.names}, schema=_WINDOWS)


def window_contents(windows: Windows, data: TokenData) -> IntArray:
    """Hash what each window consists of, wherever it lies: equal hashes, equal inputs and targets.

    Under one tokenizer and prefix token; so windows of two runs are matched, be it over other documents.
    """
    begin_W = np.asarray(data.offsets_D1[windows.document])
    columns = (windows.start, windows.score_start, windows.stop, windows.prefix, begin_W)
    contents = np.empty(len(begin_W), dtype=np.int64)
    for index, (start, score_start, stop, prefix, begin) in enumerate(zip(*columns, strict=True)):
        here = slice(begin + start, begin + stop)
        digest = hashlib.blake2b(
            np.array([prefix, score_start - start], dtype="<i8").tobytes(), digest_size=8
        )
        digest.update(np.asarray(data.tokens[here]).astype("<u4").tobytes())
        if data.labels is not None:
            digest.update((np.asarray(data.labels[here]) == CROSS_ENTROPY_IGNORE_IDX).tobytes())
        contents[index] = int.from_bytes(digest.digest(), "little", signed=True)
    return contents


class _Documents:
    """Sums windows to documents as they come by: a document's windows are neighbours."""

    def __init__(self, file: pq.ParquetWriter, data: TokenData, covered: CoveredText | None) -> None:
        self._file, self._data, self._covered = file, data, covered
        self._rows: dict[int, list[Any]] = {}

    def add(self, rows: Rows) -> None:
        """Add the windows of a chunk; documents that no later window can belong to are written."""
        document_K, first_K = np.unique(rows.windows.document, return_index=True)
        last_K = np.append(first_K[1:], len(rows.windows.document))
        for document, first, last in zip(document_K.tolist(), first_K.tolist(), last_K.tolist(), strict=True):
            row = self._rows.setdefault(document, [0, 0, 0, 0, []])
            row[0] += int((rows.num_excluded[first:last] == 0).sum())
            for column, values in enumerate((rows.num_tokens, rows.num_excluded, rows.num_correct), start=1):
                row[column] += int(values[first:last].sum())
            row[4] += rows.nll_sum[first:last].tolist()
        self.flush(int(document_K[-1]))

    def flush(self, before: int) -> None:
        """Write the documents with numbers below ``before``."""
        done = [document for document in self._rows if document < before]
        if done:
            table = []
            for document in done:
                num_windows, *counts, nll_sums = self._rows.pop(document)
                table.append(self._figures(document, num_windows, counts, nll_sums))
            columns: dict[str, Any] = {name: [row[name] for row in table] for name in _DOCUMENTS.names[2:]}
            columns["document"] = done
            columns["domain"] = _domain_names(self._data, np.array(done))
            self._file.write_table(
                pa.table({name: columns[name] for name in _DOCUMENTS.names}, schema=_DOCUMENTS)
            )

    def _figures(
        self, document: int, num_windows: int, counts: list[int], nll_sums: list[float]
    ) -> dict[str, Any]:
        num_tokens, num_excluded, num_correct = counts
        nll_sum = math.fsum(nll_sums)
        num_bytes = num_words = None
        if self._covered is not None:
            num_bytes = int(self._covered.num_bytes_D[document])
            num_words = int(self._covered.num_words_D[document])
        ce_loss = nll_sum / num_tokens if num_tokens else None
        return {
            "num_windows": num_windows,
            "num_tokens": num_tokens,
            "num_excluded": num_excluded,
            "num_correct": num_correct,
            "num_bytes": num_bytes,
            "num_words": num_words,
            "nll_sum": nll_sum,
            "ce_loss": ce_loss,
            "perplexity": None if ce_loss is None else exp_or_infinity(ce_loss),
            "bits_per_byte": nll_sum / (num_bytes * math.log(2)) if num_bytes else None,
        }
