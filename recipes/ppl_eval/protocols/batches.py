"""Windows to tensors: gather tokens, align labels, pad on the right."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols import coverage
from ppl_eval.protocols.base import IntArray, Windows
from ppl_eval.protocols.plan import Plan
from ppl_eval.protocols.sampler import DUMMY_BATCH


@dataclass(frozen=True)
class Batch:
    """The windows that go through the model together.

    Attributes:
        tokens_BT: inputs, padded on the right with 0; int64.
        labels_BT: the target of each input, -100 where nothing is scored; int64.
        window_ids_B: ids in the plan; empty for a dummy batch.
        document_B: document of each window.
        start_B: first position of each window in its document.
        scored_hash_sums_B4: set hash of each window's scored targets (see ``coverage``); uint64.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    window_ids_B: IntArray
    document_B: IntArray
    start_B: IntArray
    scored_hash_sums_B4: coverage.HashSums

    def part(self, begin: int, end: int) -> "Batch":
        """Return the windows [begin, end) of the batch, padded as they are in it."""
        return Batch(*(getattr(self, spec.name)[begin:end] for spec in fields(self)))


class WindowBatches:
    """Batch b of the plan as tensors, made when asked for.

    Args:
        plan: the plan.
        data: the token stream that the plan was laid over.
        prefix_token: the token that stands before windows with a prefix; None if the protocol has none.
    """

    def __init__(self, plan: Plan, data: TokenData, prefix_token: int | None = None) -> None:
        self.plan, self.data, self.prefix_token = plan, data, prefix_token

    def __len__(self) -> int:
        """Batches of the plan."""
        return self.plan.num_batches

    def __getitem__(self, batch: int) -> Batch:
        """The batch with this index, or a dummy of one unscored token for ``DUMMY_BATCH``."""
        if batch == DUMMY_BATCH:
            none = np.zeros(0, dtype=np.int64)
            return Batch(
                torch.zeros(1, 1, dtype=torch.int64),
                torch.full((1, 1), CROSS_ENTROPY_IGNORE_IDX),
                none,
                none,
                none,
                np.zeros((0, coverage.NUM_HASH_SUMS), dtype=np.uint64),
            )
        window_ids = self.plan.batch_ids(batch)
        windows = self.plan.locate(window_ids)
        tokens_BT, labels_BT = self._tensors(windows)
        return Batch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(labels_BT),
            window_ids,
            windows.document,
            windows.start,
            scored_hash_sums(windows, self.data),
        )

    def _tensors(self, windows: Windows) -> tuple[IntArray, IntArray]:
        prefix_B1 = windows.prefix.astype(np.int64)[:, None]
        start_B1, stop_B1 = windows.start[:, None], windows.stop[:, None]
        offset_B1 = self.data.offsets_D1[windows.document][:, None]
        column_T = np.arange(self._width(int(windows.num_inputs.max())), dtype=np.int64)
        # Position of the target of each input; its input is one before it, or the prefix token.
        target_BT = start_B1 + column_T + 1 - prefix_B1
        real_BT = target_BT < stop_B1
        target_BT = np.where(real_BT, target_BT, start_B1)
        scored_BT = real_BT & (target_BT >= windows.score_start[:, None])
        stream_BT = offset_B1 + target_BT

        labels = self.data.tokens if self.data.labels is None else self.data.labels
        labels_BT = np.where(scored_BT, labels[stream_BT].astype(np.int64), CROSS_ENTROPY_IGNORE_IDX)
        tokens_BT = self.data.tokens[np.maximum(stream_BT - 1, 0)].astype(np.int64)
        tokens_BT[~real_BT] = 0
        if windows.prefix.any():
            assert self.prefix_token is not None, "the plan wants a prefix token, and none was given"
            tokens_BT[windows.prefix, 0] = self.prefix_token
        return tokens_BT, labels_BT

    def _width(self, num_inputs: int) -> int:
        # A CPU takes longer for 1,023 positions than for 1,024, the last of which is padding.
        return max(num_inputs, min(-(-num_inputs // 8) * 8, self.plan.protocol.max_seq_len))


def scored_hash_sums(windows: Windows, data: TokenData) -> coverage.HashSums:
    """Hash the set of the targets that each window scores, label masks applied; uint64 [windows, 4]."""
    num_targets = windows.num_targets
    document_N = np.repeat(windows.document, num_targets)
    # Positions of each window's targets, laid end to end: a running index less where its window begins, plus
    # the window's first target.
    bounds = np.concatenate([[0], np.cumsum(num_targets)])
    position_N = np.arange(len(document_N), dtype=np.int64) + np.repeat(
        windows.score_start - bounds[:-1], num_targets
    )
    hashes_N4 = coverage.hashes(document_N, position_N)
    if data.labels is not None:
        masked_N = data.labels[data.offsets_D1[document_N] + position_N] == CROSS_ENTROPY_IGNORE_IDX
        hashes_N4[masked_N] = 0
    # Differences of running sums, all modulo 2^64.
    running = np.zeros((len(document_N) + 1, coverage.NUM_HASH_SUMS), dtype=np.uint64)
    np.cumsum(hashes_N4, axis=0, out=running[1:])
    return running[bounds[1:]] - running[bounds[:-1]]


def masked_targets(plan: Plan, data: TokenData, span: tuple[int, int] | None = None) -> int:
    """Targets of the plan's windows whose label is -100: the plan counts them as expected, and nothing scores
    them.

    Args:
        plan: the plan.
        data: its tokens.
        span: [first, last) of the places whose windows to look at (``Plan.ids``); None for all.
    """
    if data.labels is None:
        return 0
    num_masked = 0
    step = max(1, (1 << 20) // plan.protocol.max_seq_len)
    begin_at, end_at = span or (0, plan.num_windows)
    for first in range(begin_at, end_at, step):
        windows = plan.locate(plan.ids(first, min(first + step, end_at)))
        begin = data.offsets_D1[windows.document]
        # Running counts of masked labels over the span of these windows: a difference of two is a window's.
        low, high = int((begin + windows.score_start).min()), int((begin + windows.stop).max())
        masked = np.concatenate([[0], np.cumsum(data.labels[low:high] == CROSS_ENTROPY_IGNORE_IDX)])
        num_masked += int(
            (masked[begin + windows.stop - low] - masked[begin + windows.score_start - low]).sum()
        )
    return num_masked


def expected_hash_sums(
    plan: Plan, data: TokenData, rank: int, num_replicas: int, span: tuple[int, int] | None = None
) -> coverage.HashSums:
    """Return this rank's share of the set hash of all targets of the plan.

    The share is a run of neighbouring places, not the batches that the rank scores, so that the sum over
    ranks checks the sharding and not only the arithmetic.

    Args:
        plan: the plan.
        data: its tokens.
        rank: data-parallel rank.
        num_replicas: data-parallel degree.
        span: [first, last) of the places whose windows are shared out (``Plan.ids``); None for all.
    """
    begin, end = span or (0, plan.num_windows)
    first, last = (begin + (end - begin) * r // num_replicas for r in (rank, rank + 1))
    sums = np.zeros(coverage.NUM_HASH_SUMS, dtype=np.uint64)
    # About 2^20 targets at a time, so that memory stays flat.
    step = max(1, (1 << 20) // plan.protocol.max_seq_len)
    for start in range(first, last, step):
        windows = plan.locate(plan.ids(start, min(start + step, last)))
        sums += scored_hash_sums(windows, data).sum(axis=0)
    return sums
