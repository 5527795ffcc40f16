"""``tokens.parquet``: one row a scored token, in the order of the plan. A folder of parts:

    window_id    int64    number of its window in the plan
    document     int64    number of its document
    position     int64    which token of the document it is
    token        int32    its id
    text         string   the text it stands for; replacement characters for a part of a character
    num_bytes    int32    UTF-8 bytes that it stands for; null where the tokenizer cannot say
    byte_offset  int64    UTF-8 bytes of the document before it; null likewise
    nll          float    its NLL, nats
    rank         int32    1 where it was the most likely token; of equal ones the lower id comes first
    top_token    int32    id of the most likely token
    entropy      float    of the model's distribution over its vocabulary, nats

and with a reference

    reference_nll  float  NLL under the reference, nats
    kl             float  KL(reference || model) of the distributions before it, nats
    reverse_kl     float  KL(model || reference), nats
    top_rank       int32  rank that the model gives to the reference's most likely token

Parts are cut by the plan alone, so the files are the same, byte for byte, for any number of ranks. All ranks
join their tokens a part at a time; ranks that share the output folder then take turns in writing.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ppl_eval.config.files import whole_file
from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics.denominators import sums_between
from ppl_eval.protocols.base import IntArray
from ppl_eval.protocols.plan import Plan
from ppl_eval.results.records import Reduce
from ppl_eval.results.token_spool import COMPARED, SpooledTokens

NAME = "tokens.parquet"
_COLUMNS = (
    [(name, pa.int64()) for name in ("window_id", "document", "position")]
    + [("token", pa.int32()), ("text", pa.string()), ("num_bytes", pa.int32()), ("byte_offset", pa.int64())]
    + [("nll", pa.float32()), ("rank", pa.int32()), ("top_token", pa.int32()), ("entropy", pa.float32())]
)
_COMPARED_COLUMNS = [(name, pa.float32()) for name in COMPARED[:-1]] + [(COMPARED[-1], pa.int32())]
_TOKENS_OF_PART = 1 << 19
_TOKENS_OF_ROW_GROUP = 1 << 17

Texts = Callable[[Sequence[int]], list[str]]


class Part(NamedTuple):
    """The tokens of neighbouring windows.

    Attributes:
        number: of the part.
        first: the first window.
        num_tokens_W: scored tokens of each window.
        records: of the tokens; without ``window_id``.
    """

    number: int
    first: int
    num_tokens_W: IntArray
    records: npt.NDArray[Any]


def write(
    output_dir: Path,
    found: SpooledTokens,
    plan: Plan,
    data: TokenData,
    texts: Texts,
    *,
    rank: int,
    world_size: int,
    add_over_ranks: Reduce,
    tokens_of_part: int = _TOKENS_OF_PART,
) -> None:
    """Write the dataset; all ranks take part.

    Args:
        output_dir: the run's; on rank 0's file system, and where others share it they write too.
        found: the tokens of this rank's windows.
        plan: the plan.
        data: its tokens.
        texts: ids to the text of each.
        rank: this rank.
        world_size: all ranks.
        add_over_ranks: sums an int64 vector over ranks.
        tokens_of_part: about how many tokens a part holds.
    """
    half = output_dir / f".{NAME}.half"
    writers = _writers(half, rank, world_size, add_over_ranks)
    mine = writers.index(rank) if rank in writers else None
    offsets = _ByteOffsets(data)
    with ThreadPoolExecutor(1) as pool:
        pending: Future[None] | None = None
        for part in gather(found, plan, add_over_ranks, windows_of_part(plan, tokens_of_part)):
            if part.number % len(writers) != mine:
                continue
            if pending is not None:
                pending.result()
            # While this rank writes, it goes on joining parts that others write.
            pending = pool.submit(_write_part, half, part, plan, data, (texts, offsets))
        if pending is not None:
            pending.result()
    add_over_ranks(np.zeros(1, dtype=np.int64))  # All parts are there.
    if rank == 0:
        whole = output_dir / NAME
        shutil.rmtree(whole, ignore_errors=True)
        half.rename(whole)


def windows_of_part(plan: Plan, tokens_of_part: int) -> int:
    """Return how many windows make a part: a function of the plan, never of the ranks."""
    wanted = plan.num_windows * tokens_of_part // max(1, plan.expected_targets())
    return max(1, min(wanted, 8 * tokens_of_part // plan.protocol.max_seq_len))


def gather(found: SpooledTokens, plan: Plan, add_over_ranks: Reduce, windows_at_once: int) -> Iterator[Part]:
    """Join the tokens of all ranks in the plan's order; every rank must run through it.

    A token was scored by one rank, so its row is the sum over ranks of that row and zeros, bit by bit.
    """
    fields = [(name, found.form[name]) for name in found.form.names or () if name != "window_id"]
    num_words = found.form.itemsize // 8
    for number, first in enumerate(range(0, plan.num_windows, windows_at_once)):
        last = min(first + windows_at_once, plan.num_windows)
        low, high = np.searchsorted(found.window_W, [first, last])
        num_tokens_W = np.zeros(last - first, dtype=np.int64)
        num_tokens_W[found.window_W[low:high] - first] = found.num_tokens_W[low:high]
        num_tokens_W = add_over_ranks(num_tokens_W)
        begin_W = np.cumsum(num_tokens_W) - num_tokens_W
        rows = np.zeros((int(num_tokens_W.sum()), num_words - 1), dtype=np.int64)
        for index in range(low, high):
            records = found.read(index)
            begin = begin_W[found.window_W[index] - first]
            rows[begin : begin + len(records)] = records.view(np.int64).reshape(-1, num_words)[:, 1:]
        rows = add_over_ranks(rows.ravel())
        yield Part(number, first, num_tokens_W, rows.view(fields))


def _writers(half: Path, rank: int, world_size: int, add_over_ranks: Reduce) -> list[int]:
    """Make an empty folder on rank 0, and return the ranks that see it."""
    number = np.zeros(1, dtype=np.int64)
    if rank == 0:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        number[0] = secrets.randbits(62)
        (half / f".{number[0]}").touch()
    number = add_over_ranks(number)
    sees = np.zeros(world_size, dtype=np.int64)
    sees[rank] = (half / f".{number[0]}").exists()
    sees = add_over_ranks(sees)
    if rank == 0:
        (half / f".{number[0]}").unlink()
    return np.flatnonzero(sees).tolist()


def _write_part(
    half: Path, part: Part, plan: Plan, data: TokenData, text: tuple[Texts, "_ByteOffsets"]
) -> None:
    texts, offsets = text
    windows = plan.windows(part.first, part.first + len(part.num_tokens_W))
    document_N = np.repeat(windows.document, part.num_tokens_W)
    stream_N = np.asarray(data.offsets_D1[document_N]) + part.records["position"]
    tokens_N = np.asarray(data.tokens[stream_N]).astype(np.int32)
    num_bytes_N, byte_offset_N = offsets.of(document_N, stream_N)
    columns: dict[str, Any] = {
        **{name: part.records[name] for name in part.records.dtype.names or ()},
        "window_id": np.repeat(np.arange(part.first, part.first + len(windows.start)), part.num_tokens_W),
        "document": document_N,
        "token": tokens_N,
        "text": _text_column(tokens_N, texts),
        "num_bytes": num_bytes_N,
        "byte_offset": byte_offset_N,
    }
    schema = pa.schema(_COLUMNS + (_COMPARED_COLUMNS if "kl" in columns else []))
    table = pa.table({name: columns[name] for name in schema.names}, schema=schema)
    with whole_file(half / f"part-{part.number:06}.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=_TOKENS_OF_ROW_GROUP)


def _text_column(tokens_N: npt.NDArray[np.int32], texts: Texts) -> pa.Array:
    ids, index_N = np.unique(tokens_N, return_inverse=True)
    pieces = pa.array(texts(ids.tolist()), pa.string())
    return pieces.take(pa.array(index_N))


class _ByteOffsets:
    """Byte offsets of tokens in their documents, for parts that ascend.

    Args:
        data: the tokens.
    """

    def __init__(self, data: TokenData) -> None:
        self._data = data
        # Bytes of the stream before `_at`; and the start of the document looked at last, likewise.
        self._at = self._sum = self._begin = self._begin_sum = 0

    def of(self, document_N: IntArray, stream_N: IntArray) -> tuple[Any, Any]:
        """Return bytes and byte offset of each token; nulls where they are not known."""
        if self._data.token_bytes is None:
            return (pa.nulls(len(stream_N)),) * 2
        if not len(stream_N):
            return stream_N, stream_N
        begin_N = np.asarray(self._data.offsets_D1[document_N])
        if begin_N[0] > self._begin:
            self._begin, self._begin_sum = int(begin_N[0]), self._advance(int(begin_N[0]))
        base = self._advance(int(stream_N[0]))
        low = self._at
        sizes = np.asarray(self._data.token_bytes[low : int(stream_N[-1]) + 1]).astype(np.int64)
        before = base + np.concatenate([[0], np.cumsum(sizes)])
        begins = before[np.maximum(begin_N - low, 0)]
        begins[begin_N <= self._begin] = self._begin_sum
        if begin_N[-1] > self._begin:
            self._begin, self._begin_sum = int(begin_N[-1]), int(begins[-1])
        return sizes[stream_N - low], before[stream_N - low] - begins

    def _advance(self, to: int) -> int:
        assert self._data.token_bytes is not None
        ends = np.array([to])
        self._sum += int(sums_between(self._data.token_bytes, np.array([self._at]), ends)[0])
        self._at = to
        return self._sum
