"""What is kept of each scored window: everything that any figure of the result is computed from.

A record is little endian and of one size in a run:

    window_id, num_tokens, num_correct   int64
    num_excluded                         int64; targets of a window that is left out, else 0
    in_parts                             int64; 1 if its batch went through the model in parts, else 0
    nll_sum, nll_sq_sum                  float64; nats, nats^2
    scored_hash_sums                     4 x uint64; set hash of the window's targets (``coverage``)
    bucket_nll                           5 x int64 a position bucket; see ``fixed_limbs``
    bucket_tokens, bucket_correct,
    bucket_excluded                      int64 a position bucket
    the fields of a comparison           with a reference; see ``comparison.record_fields``
    check                                uint64 over all the rest

A window that is left out (``finite.exclude``) has zeros for all but its targets: ``num_excluded``,
``bucket_excluded`` and their hash.

New fields come with a new ``VERSION``, which is part of what a ledger is known by.
"""

import numpy as np
import numpy.typing as npt
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.config.settings import Settings
from ppl_eval.metrics import comparison
from ppl_eval.metrics.totals import NUM_VALUE_LIMBS, WindowScores, fixed_limbs
from ppl_eval.protocols import coverage
from ppl_eval.protocols.base import BoolArray, IntArray
from ppl_eval.protocols.batches import Batch

VERSION = 5
# In the order of the fields of ``WindowScores``.
WINDOW_SUMS = ("nll_sum", "nll_sq_sum", "num_tokens", "num_correct")
_COUNTS = ("window_id", "num_tokens", "num_correct", "num_excluded", "in_parts")
_SUMS = ("nll_sum", "nll_sq_sum")

Records = npt.NDArray[np.void]
Form = np.dtype[np.void]


def record_dtype(num_buckets: int = 0, compared: bool = False) -> np.dtype[np.void]:
    """Return the form of a record.

    Args:
        num_buckets: position buckets of the run.
        compared: whether the run has a reference.
    """
    buckets = [
        ("bucket_nll", "<i8", (num_buckets, NUM_VALUE_LIMBS)),
        ("bucket_tokens", "<i8", (num_buckets,)),
        ("bucket_correct", "<i8", (num_buckets,)),
        ("bucket_excluded", "<i8", (num_buckets,)),
    ]
    return np.dtype(
        [(name, "<i8") for name in _COUNTS]
        + [(name, "<f8") for name in _SUMS]
        + [("scored_hash_sums", "<u8", (coverage.NUM_HASH_SUMS,))]
        + (buckets if num_buckets else [])
        + (comparison.record_fields(num_buckets) if compared else [])
        + [("check", "<u8")]
    )


PLAIN = record_dtype()


def form_of(settings: Settings) -> Form:
    """Return the form of a run's records."""
    return record_dtype(settings.position_buckets or 0, settings.reference is not None)


def records_of(batch: Batch, scores: WindowScores, num_buckets: int = 0, bucket_width: int = 0) -> Records:
    """Return the records of a scored batch.

    Args:
        batch: the batch.
        scores: what it scored.
        num_buckets: position buckets of the run.
        bucket_width: positions of a bucket: bucket i has the targets after i * width + 1 to (i + 1) * width
            tokens.
    """
    compared = scores.comparison
    records = np.zeros(len(batch.window_ids_B), dtype=record_dtype(num_buckets, compared is not None))
    records["window_id"] = batch.window_ids_B
    records["num_tokens"], records["num_correct"] = scores.num_tokens_B, scores.num_correct_B
    records["nll_sum"], records["nll_sq_sum"] = scores.nll_sum_B, scores.nll_sq_sum_B
    records["scored_hash_sums"] = batch.scored_hash_sums_B4
    if scores.num_excluded_B is not None:
        records["num_excluded"] = scores.num_excluded_B
    records["in_parts"] = scores.in_parts
    scored_BT, excluded_BT = targets_of(batch, scores)
    if compared is not None:
        assert scores.nll_BT is not None
        comparison.fill_records(records, scores.nll_BT, scored_BT, compared, bucket_width)
    if num_buckets:
        assert scores.nll_BT is not None
        assert scores.correct_BT is not None
        for index in range(num_buckets):
            columns = slice(index * bucket_width, (index + 1) * bucket_width)
            # NLL and correctness are 0 where nothing is scored.
            for limb, values_BT in enumerate(fixed_limbs(scores.nll_BT[:, columns])):
                records["bucket_nll"][:, index, limb] = values_BT.sum(axis=1)
            records["bucket_tokens"][:, index] = scored_BT[:, columns].sum(axis=1)
            records["bucket_correct"][:, index] = scores.correct_BT[:, columns].sum(axis=1)
            records["bucket_excluded"][:, index] = excluded_BT[:, columns].sum(axis=1)
    records["check"] = check_numbers(records)
    return records


def targets_of(batch: Batch, scores: WindowScores) -> tuple[BoolArray, BoolArray]:
    """Return where a batch's windows have targets: those that are scored, and those that are left out; bool
    [B, T] each."""
    scored_BT = batch.labels_BT[: len(batch.window_ids_B)].numpy() != CROSS_ENTROPY_IGNORE_IDX
    if scores.num_excluded_B is None:
        return scored_BT, np.zeros_like(scored_BT)
    excluded_B1 = (scores.num_excluded_B > 0)[:, None]
    return scored_BT & ~excluded_B1, scored_BT & excluded_B1


def whole_records(records: Records) -> Records:
    """Return those records whose check number fits their content."""
    return records[records["check"] == check_numbers(records)]


def check_numbers(records: Records) -> npt.NDArray[np.uint64]:
    """Return the check number of each record, from all its other bytes."""
    words = records.view(np.uint64).reshape(len(records), records.itemsize // 8)[:, :-1]
    # Not zero for a record of zeros, which is what a file system may leave of a write it never made.
    check = np.full(len(records), 1, dtype=np.uint64)
    for column in range(words.shape[1]):
        check = coverage.mix64(check + words[:, column])
    return check


def bucket_width(max_seq_len: int, num_buckets: int) -> int:
    """Return how many positions a bucket has."""
    return -(-max_seq_len // max(num_buckets, 1))


def no_records(form: Form) -> Records:
    """Return an empty array of records."""
    return np.zeros(0, dtype=form)


def in_order(records: Records) -> Records:
    """Return records ordered by window, each window once.

    A window that was scored more than once (by runs that died) was scored with the same bits.
    """
    window_ids: IntArray = records["window_id"]
    _, first = np.unique(window_ids, return_index=True)
    return records[first]
