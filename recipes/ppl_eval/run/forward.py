"""One batch through the model, and what is done when that goes wrong: memory that runs out, a NaN to locate.

Where memory runs out, the batch goes through the model in halves, down to one window at a time, and so do the
batches after it. The plan stays as it is: which windows a batch has, and how far they are padded.

Not where ranks share their forwards (FSDP, tensor and context parallelism). The rank that ran out of memory
has left a forward in the middle, and its peers stand in the next collective of it: they would have to find
out, leave it too, and make as many forwards more as it makes. An agreement before every forward would cost
every run a message a batch, so there the run ends, and the ledger keeps what was scored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torchtune.utils import get_logger

from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.distributed.causes import OutOfMemory, first_line, is_out_of_memory
from ppl_eval.metrics.totals import Totals, WindowScores, joined_scores
from ppl_eval.models.first_bad_module import Watched, watching
from ppl_eval.protocols.batches import Batch
from ppl_eval.run.facts import batch_dependence
from ppl_eval.run.state import RunState
from ppl_eval.scoring.finite import not_finite
from ppl_eval.scoring.nll import score_batch


class Outcome(NamedTuple):
    """What came of a batch.

    Attributes:
        scores: of its windows.
        watched: with ``debug_nan`` and an NLL that is not finite, what hooks saw; else None.
    """

    scores: WindowScores
    watched: Watched | None = None


class Forwards:
    """Called with one batch after the other, of several threads too.

    Args:
        state: the run.

    Attributes:
        windows_at_once: most windows that go through the model together; less than the batch size once
            memory has run out.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.windows_at_once = state.inputs.plan.batch_size
        # Several batches at once share the memory.
        self._alone = state.concurrent_batches == 1
        self._running = 0
        self._turns = threading.Condition()

    def __call__(self, batch: Batch) -> Outcome:
        """Score a batch.

        Raises:
            OutOfMemory: if not even one window fits, or the batch may not be halved; says what would fit.
        """
        try:
            return self._score(batch)
        except Exception as error:
            if len(batch.window_ids_B):
                windows, documents = (
                    rank_ranges(sorted(set(ids.tolist()))) for ids in (batch.window_ids_B, batch.document_B)
                )
                error.add_note(f"while scoring window {windows} (document {documents})")
            raise

    def _score(self, batch: Batch) -> Outcome:
        while True:
            alone, at_once = self._alone, min(self.windows_at_once, len(batch.tokens_BT))
            try:
                with self._turn():
                    return self._score_parts(batch, at_once)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Out of the handler, whose traceback held the tensors.
            if self._state.device.type == "cuda":
                torch.cuda.empty_cache()
            self._want_less(batch, at_once, alone, reason)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._turns:
            self._turns.wait_for(lambda: not (self._alone and self._running))
            self._running += 1
        try:
            yield
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()

    def _want_less(self, batch: Batch, at_once: int, alone: bool, reason: str) -> None:
        state = self._state
        if (at_once == 1 and alone) or state.dims.forwards_are_shared:
            raise OutOfMemory(f"{reason}. {_what_would_fit(state, at_once, batch.tokens_BT.shape[1])}")
        with self._turns:
            if not alone:
                if self._alone:
                    return  # Another thread said so.
                self._alone = True
                now = "batches go through the model one at a time from here on"
            else:
                self.windows_at_once = min(self.windows_at_once, at_once // 2)
                now = f"batches go through the model by {self.windows_at_once} windows from here on"
        more = f". {_other_bits(why)}" if (why := batch_dependence(state)) else ", which changes no bit"
        log = get_logger(state.settings.log_level)
        log.warning(f"{state.world.where} ran out of memory with {at_once} windows: {now}{more}")

    def _score_parts(self, batch: Batch, at_once: int) -> Outcome:
        parts = [batch]
        if at_once < len(batch.tokens_BT):
            begins = range(0, len(batch.tokens_BT), at_once)
            parts = [batch.part(begin, begin + at_once) for begin in begins]
        scores, first_watched = [], None
        for index, part in enumerate(parts):
            found, watched = self._score_part(part)
            scores.append(found)
            if watched is not None and first_watched is None:
                first_watched = watched
                if watched.row is not None:
                    watched.row += index * at_once
        return Outcome(joined_scores(scores), first_watched)

    def _score_part(self, batch: Batch) -> Outcome:
        state = self._state
        scorer, device, debug = state.model.scorer, state.device, state.settings.debug_nan
        reference = None if state.model.reference is None else state.model.reference.scorer
        watch = watching(scorer.model, (batch.tokens_BT.shape[0], batch.tokens_BT.shape[1]))
        # Forwards that are shared with ranks which score other windows cannot be repeated by one of them.
        every = debug and state.dims.dp_shard > 1
        with watch if every else nullcontext() as watched:
            scores = score_batch(scorer, batch, device, reference)
        if not debug or not not_finite(scores).any():
            return Outcome(scores)
        if watched is None:
            # A compiled layer is one piece.
            with torch.compiler.set_stance("force_eager"), watch as watched:
                score_batch(scorer, batch, device)
        return Outcome(scores, watched)


def memory_note(state: RunState, totals: Totals) -> list[str]:
    """Return the line for the notes of a result some of whose batches went through the model in parts, in
    this run or in one that it goes on from; none if none did."""
    in_parts = totals.num_windows_in_parts
    if not in_parts:
        return []
    why = batch_dependence(state)
    num_windows = totals.num_windows + totals.num_excluded_windows
    more = _other_bits(why) if why else "The bits are the same"
    return [
        f"memory ran out, so {in_parts:,} of {num_windows:,} windows went through the model in smaller"
        f" batches than of {state.inputs.plan.batch_size}. {more}"
    ]


def _other_bits(why: str) -> str:
    return f"Other batches may have other last bits: {why}"


def _what_would_fit(state: RunState, at_once: int, num_positions: int) -> str:
    settings = state.settings
    shorter = max(1, num_positions // 2)
    less = [f"protocol.max_seq_len={shorter} (another number: the model sees less at once)"]
    if settings.max_logits_mib > 1:
        less.append(f"max_logits_mib={settings.max_logits_mib / 2:g}")
    if settings.data_parallel_shard_dim == 1:
        less.append("data_parallel_shard_dim=-1 over several devices, which splits the weights")
    else:
        less.append("a larger data_parallel_shard_dim, which splits the weights further")
    if at_once > 1:
        less.insert(0, f"batch_size={at_once // 2}")
        tried = (
            f"It was tried with {at_once} windows at once; ranks share every forward here, so none of them"
            " can halve its batch alone"
        )
    else:
        tried = f"It was tried with one window of {num_positions} tokens"
    return f"{tried}. Less is needed with {'; '.join(less)}; or with fewer processes on this host"
