"""The Parquet files of a run: which of them a config asks for, and what each is made of."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ppl_eval.config.settings import Settings
from ppl_eval.distributed.collectives import AddOverRanks
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics import denominators
from ppl_eval.metrics.window_records import Records
from ppl_eval.protocols.base import IntArray
from ppl_eval.results import records, tokens
from ppl_eval.results.token_spool import tokens_of
from ppl_eval.run.inputs import Inputs
from ppl_eval.tokenization.pieces import token_texts


def write_tables(
    settings: Settings,
    inputs: Inputs,
    own: Records,
    ledgers: Sequence[Path],
    *,
    excluded_W: IntArray,
    world: World,
    add_over_ranks: AddOverRanks,
) -> None:
    """Write what each window, document and token scored, where asked for; all ranks take part.

    Args:
        settings: of the run.
        inputs: tokens and plan.
        own: what this rank answers for (``Ledger.own``).
        ledgers: the ledgers' folders of this host, where its tokens are.
        excluded_W: windows that are left out (``Accumulator.excluded_W``).
        world: the processes.
        add_over_ranks: sums a vector over ranks.

    Raises:
        ValueError: if tokens are missing of windows that are recorded.
    """
    output_dir, plan, data = Path(settings.output_dir), inputs.plan, inputs.data
    if settings.per_window or settings.per_document:
        records.write(
            output_dir if world.rank == 0 else None,
            own,
            plan,
            data,
            covered=denominators.covered_text(plan, data, excluded_W),
            add_over_ranks=add_over_ranks,
            per_window=settings.per_window,
            per_document=settings.per_document,
        )
    if not settings.per_token:
        return
    found = tokens_of(settings, ledgers, own, world.rank)
    tokens.write(
        output_dir,
        found,
        plan,
        data,
        partial(token_texts, inputs.encoder),
        rank=world.rank,
        world_size=world.world_size,
        add_over_ranks=add_over_ranks,
    )
