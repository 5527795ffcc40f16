"""Figures that need every window or token of the run once more, after the sums of all ranks were joined."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppl_eval.config.settings import Settings
from ppl_eval.distributed.collectives import AddOverRanks
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics.order_statistics import Float32Array, percentiles
from ppl_eval.metrics.totals import resolve_precision
from ppl_eval.metrics.window_records import Records
from ppl_eval.results import records
from ppl_eval.results.token_spool import tokens_of
from ppl_eval.run.inputs import Inputs

# The figures of llama-perplexity's table, by the text that names them in the result.
_PERCENTS = ("50", "90", "95", "99", "99.9", "100")
_WINDOWS_AT_ONCE = 1024


class Joined(NamedTuple):
    """What all ranks found together.

    Attributes:
        rounded_nll: the NLL in the accumulation in use, nats; None where that is ``exact``.
        kl_percentiles: percentiles of the KL divergence of single tokens, nats; None without a reference.
    """

    rounded_nll: float | None = None
    kl_percentiles: dict[str, float] | None = None


def join(
    settings: Settings,
    inputs: Inputs,
    own: Records,
    ledgers: Sequence[Path],
    *,
    world: World,
    add_over_ranks: AddOverRanks,
) -> Joined:
    """Find what only all ranks together can; for a part of a run nothing. All ranks take part.

    Args:
        settings: of the run.
        inputs: tokens and plan.
        own: what this rank answers for (``Ledger.own``).
        ledgers: the ledgers' folders of this host, where its tokens are.
        world: the processes.
        add_over_ranks: sums a vector over ranks.

    Raises:
        ValueError: if tokens are missing of windows that are recorded.
    """
    if settings.part is not None:
        return Joined()
    precision, rounded_nll = precision_of(settings, inputs), None
    if precision != "exact":
        rounded_nll = records.rounded_nll(own, inputs.plan, precision, add_over_ranks)
    if settings.reference is None:
        return Joined(rounded_nll)
    found = tokens_of(settings, ledgers, own, world.rank)

    def walk() -> Iterator[Float32Array]:
        for first in range(0, len(own), _WINDOWS_AT_ONCE):
            indices = range(first, min(first + _WINDOWS_AT_ONCE, len(own)))
            yield np.concatenate([found.read(index)["kl"] for index in indices])

    values = percentiles(walk, [Fraction(percent) for percent in _PERCENTS], add_over_ranks)
    return Joined(rounded_nll, dict(zip(_PERCENTS, values, strict=bool(values))))


def precision_of(settings: Settings, inputs: Inputs) -> str:
    """Return the accumulation in use."""
    return resolve_precision(settings.aggregation.precision, inputs.expected_tokens)
