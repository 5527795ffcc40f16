"""What a run consists of, handed as values to whoever reports on it."""

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import torch

from ppl_eval.checkpoints.load import LoadedCheckpoint
from ppl_eval.config.settings import Settings
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.protocols.base import BoolArray
from ppl_eval.run.inputs import Inputs
from ppl_eval.run.reference import Reference
from ppl_eval.run.share import Share
from ppl_eval.scoring import concurrency
from ppl_eval.scoring.load import BuiltModel

NOTHING_DONE: BoolArray = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True)
class Source:
    """What is read before any weight: the checkpoint, opened, and the text.

    Attributes:
        checkpoint: the opened checkpoint.
        config_check: verdict of the comparison with config.json.
        inputs: tokens and plan.
        seed: the seed in force.
        notes: everything that a reader of the result must know so far.
        model_notes: those among them about the model: what was corrected, how it was checked.
        seconds: how long it took.
        reference: the model to compare with, if there is one.
    """

    checkpoint: LoadedCheckpoint
    config_check: str
    inputs: Inputs
    seed: int
    notes: tuple[str, ...]
    model_notes: tuple[str, ...]
    seconds: float
    reference: Reference | None = None


@dataclass(frozen=True)
class RunState:
    """A run that is ready to score.

    Attributes:
        settings: the checked config.
        world: the processes.
        device: where this rank computes.
        dims: degrees of parallelism.
        source: checkpoint and text.
        model: the loaded model.
        weights_hash: what all ranks loaded (``weights.agree_on_weights``).
        reference_hash: the same of the reference; None without one.
        load_seconds: how long loading took.
        started: when the run started; UTC.
        share: the batches that the run scores.
        done: whether earlier runs scored each batch of the plan; bool [num_batches], or ``NOTHING_DONE``.
    """

    settings: Settings
    world: World
    device: torch.device
    dims: ParallelDims
    source: Source
    model: BuiltModel
    weights_hash: str
    reference_hash: str | None
    load_seconds: float
    started: datetime
    share: Share
    done: BoolArray

    @property
    def concurrent_batches(self) -> int:
        """Batches that this process scores at once."""
        return concurrency.num_concurrent_batches(
            self.device,
            all(scorer.model.is_reentrant for scorer in self.model.scorers)
            and not (self.dims.forwards_are_shared or self.settings.compile),
            self.inputs.plan.batch_size * self.inputs.protocol.max_seq_len,
        )

    @property
    def inputs(self) -> Inputs:
        """Tokens and plan."""
        return self.source.inputs

    @property
    def notes(self) -> list[str]:
        """Everything that a reader of the result must know."""
        return [*self.source.notes, *self.model.notes]

    @property
    def num_done(self) -> int:
        """Batches of the share that earlier runs scored."""
        return int(self.done[self.share.batches.start : self.share.batches.stop].sum())


@dataclass(frozen=True)
class Scored:
    """What scoring found, over all ranks.

    Attributes:
        accumulator: the exact sums.
        tokens_here: targets that this rank scored.
        score_seconds: how long this rank scored.
        reduce_seconds: how long the reduction took.
        windows_at_once: most windows that went through this rank's model together in the end.
    """

    accumulator: Accumulator
    tokens_here: int
    score_seconds: float
    reduce_seconds: float
    windows_at_once: int
