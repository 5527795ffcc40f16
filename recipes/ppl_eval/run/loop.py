"""The loop: this rank's batches are scored and added up, then the sums of all ranks are joined once."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ppl_eval.config import activity
from ppl_eval.distributed.collectives import AddOverRanks
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.metrics.totals import Totals, WindowScores
from ppl_eval.metrics.window_records import Records, records_of
from ppl_eval.protocols.batches import Batch, WindowBatches, expected_hash_sums
from ppl_eval.run import nan_rule
from ppl_eval.run.forward import Forwards
from ppl_eval.run.schedule import Schedule
from ppl_eval.run.state import RunState, Scored
from ppl_eval.scoring import concurrency
from ppl_eval.scoring.finite import not_finite

Keep = Callable[[Batch, WindowScores, Records, Totals], None]


@dataclass(frozen=True)
class RankSums:
    """What one rank scored.

    Attributes:
        accumulator: its exact sums.
        seconds: how long it scored.
        windows_at_once: see ``Forwards``.
    """

    accumulator: Accumulator
    seconds: float
    windows_at_once: int


def score(state: RunState, schedule: Schedule, keep: Keep) -> RankSums:
    """Score batches and add them up.

    Args:
        state: the run.
        schedule: which batches.
        keep: called with every batch that counts, what it scored, its records, and the totals so far.

    Raises:
        ValueError: if the model gives a NaN or infinite NLL, unless ``nan`` is ``exclude``.
    """
    settings, dims, inputs = state.settings, state.dims, state.inputs
    counted = dims.is_counted(state.world.rank)
    num_buckets = settings.position_buckets or 0
    compared = settings.reference is not None
    accumulator = Accumulator(inputs.plan, inputs.data, num_buckets, compared=compared)
    batches = WindowBatches(inputs.plan, inputs.data, inputs.prefix_token)
    forwards = Forwards(state)
    begin = time.monotonic()
    for batch, (scores, watched) in concurrency.map_concurrently(
        forwards, map(batches.__getitem__, schedule), schedule.num_batches, state.concurrent_batches
    ):
        if not_finite(scores).any():
            quiet = not counted or bool(accumulator.run.totals.num_excluded_windows)
            scores = nan_rule.apply(state, batch, scores, watched, quiet=quiet)
        activity.finished(batch.window_ids_B.tolist())
        if not counted:
            continue  # A peer scored the same windows, and counts them.
        records = records_of(batch, scores, num_buckets, accumulator.bucket_width)
        accumulator.add(records)
        keep(batch, scores, records, accumulator.run.totals)
    return RankSums(accumulator, time.monotonic() - begin, forwards.windows_at_once)


def reduce(state: RunState, sums: RankSums, resumed: Records, add_over_ranks: AddOverRanks) -> Scored:
    """Join the sums of all ranks, and check that they cover the plan.

    Args:
        state: the run.
        sums: what this rank scored.
        resumed: what it answers for of the windows that earlier runs scored.
        add_over_ranks: sums a vector over ranks.

    Raises:
        ValueError: if all windows were excluded.
        RuntimeError: if they do not, which is a fault in this program.
    """
    inputs, dims, rank, accumulator = state.inputs, state.dims, state.world.rank, sums.accumulator
    totals = accumulator.run.totals
    tokens_here = totals.num_tokens
    accumulator.add(resumed)
    if dims.is_counted(rank):
        totals.expected_hash_sums = expected_hash_sums(
            inputs.plan, inputs.data, dims.dp_rank(rank), dims.dp_degree, state.share.places
        )
    begin = time.monotonic()
    accumulator.reduce(add_over_ranks)
    accumulator.join_excluded(rank, state.world.world_size, add_over_ranks)
    seconds = time.monotonic() - begin
    first, last = state.share.places
    accumulator.check_coverage(state.share.expected_tokens, last - first)
    if state.settings.part is None:
        accumulator.check_not_empty()
    return Scored(accumulator, tokens_here, sums.seconds, seconds, sums.windows_at_once)
