"""Perplexity of a language model, the same bits on one process and on a thousand.

    tune run distributed_ppl_eval --config smollm2/135M_ppl
    tune run --nproc_per_node 8 distributed_ppl_eval --config llama3_1/8B_ppl batch_size=4

Documents become windows, windows batches, and batches a plan that does not know how many ranks there are.
Each rank scores the batches that are its own, adds NLL and tokens up in integers, and one reduction at the
end joins the sums: see docs/architecture.md.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # First of all: `python -m`, as torchrun starts it, would take a json.py in the working directory.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if os.getcwd() != os.path.dirname(os.path.abspath(__file__)):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.errors import record

from ppl_eval.config import activity
from ppl_eval.config.files import keep_to_owner
from ppl_eval.config.interpreter import long_lived_objects, quieten_libraries
from ppl_eval.config.lengths import settings_by_length
from ppl_eval.config.own_code import guard_working_directory
from ppl_eval.config.settings import KEYS, USAGE, Settings, check_built, read_settings
from ppl_eval.distributed import process_group
from ppl_eval.distributed.failure import fail_together
from ppl_eval.distributed.outcome import Failure, Stop, record_cause
from ppl_eval.distributed.process import connect
from ppl_eval.distributed.rendezvous import World, environment_facts, meet

# torch models, torchtune and data libraries are imported in `setup`: a typing mistake in a config must show
# before seconds of imports.
if TYPE_CHECKING:
    import torch
    from torchtune.recipe_interfaces import EvalRecipeInterface, FTRecipeInterface

    from ppl_eval.metrics.totals import Totals, WindowScores
    from ppl_eval.metrics.window_records import Records
    from ppl_eval.protocols.batches import Batch
    from ppl_eval.run.state import RunState, Scored, Source


class DistributedPPLEvalRecipe:
    """Evaluate perplexity, by torchtune's ``FTRecipeInterface`` and ``EvalRecipeInterface``.

    Args:
        settings: the checked config, one for each context length.
        world: the processes of the run.

    Attributes:
        state: what the run consists of; after ``setup``.
        scored: what scoring found; after ``evaluate``.
        exit_code: of the comparison with the baseline; after ``save_checkpoint``.
    """

    state: RunState
    scored: Scored
    exit_code: int

    def __init__(self, settings: Sequence[Settings], world: World) -> None:
        # Steps that ranks agree on have names of their own in every length.
        self._runs = [(own, world.apart(str(n)) if n else world) for n, own in enumerate(settings)]
        self._length = 0
        self.settings, self.world = self._runs[0]
        self._started = datetime.now(UTC)
        self._resources = ExitStack()

    def setup(self, **_: Any) -> None:
        """Form the process group, prepare tokens and plan, and load the model; everything that can be wrong
        is found here."""
        from torchtune.config import log_config
        from torchtune.training import set_seed
        from torchtune.utils import get_logger

        from ppl_eval.config import environment
        from ppl_eval.parallel.parallel_dims import ParallelDims
        from ppl_eval.results import continuation
        from ppl_eval.results.result import check_comparable
        from ppl_eval.run.facts import source_facts
        from ppl_eval.run.from_folder import fill_in
        from ppl_eval.run.groups import join_groups
        from ppl_eval.run.reading import fill_model
        from ppl_eval.run.share import share_of
        from ppl_eval.run.state import NOTHING_DONE, RunState
        from ppl_eval.run.weights import hashes_of
        from ppl_eval.scoring.load import Placement

        self._runs = self.world.agree("checkpoint folder", lambda: fill_in(self._runs))
        settings, world = self.settings, self.world = self._runs[0]
        self._log = get_logger(settings.log_level)
        if world.rank == 0 and not world.embedded:
            log_config(recipe_name="DistributedPPLEvalRecipe", cfg=settings.config)
        world.agree("components", lambda: check_built(settings))
        device = world.agree(
            "device",
            lambda: environment.choose_device(settings.device, settings.backend),
            lambda device: {"backend": process_group.choose_backend(device, settings.backend)},
        )
        dtype = world.agree("dtype", lambda: environment.choose_dtype(settings.dtype, device))
        dims = world.agree("mesh", lambda: ParallelDims.from_settings(settings, world.world_size))
        self._add_over_ranks, mesh = join_groups(settings, world, device, dims, self._resources)
        self._baseline, self._metric_logger = world.agree(
            "output", lambda: continuation.prepare(settings, world, self._resources)
        )
        decoder, self._sources = world.agree(
            "inputs",
            lambda: self._read(dtype),
            lambda read: source_facts([own for own, _ in self._runs], read[1], device),
        )
        source = self._sources[0]
        world.agree("baseline", lambda: check_comparable(source.inputs, self._baseline))
        set_seed(source.seed)

        begin = time.monotonic()
        model = world.agree(
            "model",
            lambda: fill_model(settings, world, source, decoder, Placement(device, dtype, dims, mesh)),
            lambda model: model.facts(),
        )
        load_seconds = time.monotonic() - begin
        hashes = hashes_of(world, model, device)
        share = share_of(settings.part, source.inputs)
        timed = (load_seconds, self._started)
        known = (settings, world, device, dims, source, model, *hashes)
        state = RunState(*known, *timed, share, NOTHING_DONE)
        self._log_rank_zero(f"model loaded in {load_seconds:.1f} s: {model.num_parameters:,} parameters")
        self.state, self._ledger = continuation.open_ledger(state, self._resources, self._log.info)

    def load_checkpoint(self, **_: Any) -> None:
        """Open the checkpoint; weights are read later, one by one."""
        from ppl_eval.checkpoints.load import load_state_dict

        self.checkpoint = load_state_dict(self.settings.checkpointer)

    def evaluate(self, **_: Any) -> None:
        """Score this rank's batches, then add up over all ranks."""
        from ppl_eval.results.progress import Progress
        from ppl_eval.results.token_spool import TokenSpool, keeps_tokens
        from ppl_eval.run import loop
        from ppl_eval.run.schedule import Schedule

        state = self.state
        activity.enter("scoring")
        expected = state.share.expected_tokens * (1 - state.num_done / max(1, len(state.share.batches)))
        schedule = Schedule(state)
        progress = Progress(round(expected), state.dims.dp_degree, enabled=self.world.rank == 0)
        spool = (self._ledger.folder, self.world.rank, state.inputs.plan)
        tokens = TokenSpool(*spool) if keeps_tokens(self.settings) else None

        def keep(batch: Batch, scores: WindowScores, records: Records, totals: Totals) -> None:
            if tokens is not None:
                tokens.append(batch, scores)
            self._ledger.append(records)
            progress.update(totals, schedule.share)

        sums = loop.score(state, schedule, keep)
        progress.close()
        # A rank may be done long before others; a collective would not wait for them so patiently.
        self.world.agree("scored", lambda: None)
        self.scored = loop.reduce(state, sums, self._ledger.resumed, self._add_over_ranks)

    def train(self, **_: Any) -> None:
        """``FTRecipeInterface``'s name for ``evaluate``: nothing is trained."""
        self.evaluate()

    def save_checkpoint(self, **_: Any) -> None:
        """Write the result, print it, and hold it against the baseline: rank 0 does, the others wait."""
        from ppl_eval.results import joined, parquet_files, result

        state, scored, world = self.state, self.scored, self.world
        here = (self.settings, state.inputs, self._ledger.own(), [self._ledger.folder])
        ranks: dict[str, Any] = {"world": world, "add_over_ranks": self._add_over_ranks}
        if self.settings.part is None:
            parquet_files.write_tables(*here, excluded_W=scored.accumulator.excluded_W, **ranks)
        found = joined.join(*here, **ranks)
        self._ledger.close()
        row = result.rank_row(state, scored)
        per_rank = process_group.all_gather_rows(row, world.world_size, state.device)
        self.exit_code = world.agree(
            "result",
            lambda: (
                result.write_result(
                    state, scored, per_rank, found, self._baseline, metric_logger=self._metric_logger
                )
                if world.rank == 0
                else 0
            ),
        )
        if self.settings.report:
            from ppl_eval.reports import html

            folder = self.settings.output_dir
            page = world.agree("report", lambda: html.write_report_of(folder) if world.rank == 0 else None)
            self._log_rank_zero(f"report written to {page}")
        if world.local_rank == 0 and self.settings.part is None:
            self._ledger.remove()

    def cleanup(self, **_: Any) -> None:
        """Give back what setup took; safe to call at any time."""
        self._resources.close()

    def next_length(self) -> bool:
        """Take up the next context length with the loaded model; False after the last one."""
        from ppl_eval.results import continuation
        from ppl_eval.results.lengths import write_lengths

        self._length += 1
        if self._length == len(self._runs):
            if self._length > 1 and self.world.rank == 0:
                print(write_lengths([own.output_dir for own, _ in self._runs]), flush=True)
            return False
        self.settings, self.world = own = self._runs[self._length]
        self._baseline, self.state, self._ledger = continuation.take_up(
            self.state, own, self._sources[self._length], self._resources, self._log.info
        )
        return True

    def _read(self, dtype: torch.dtype) -> tuple[Any, list[Source]]:
        from ppl_eval.run.reading import read_sources

        self.load_checkpoint()
        return read_sources(self._runs, self.checkpoint, dtype, self._log_rank_zero)

    def _log_rank_zero(self, message: str) -> None:
        if self.world.rank == 0:
            self._log.info(message)


if TYPE_CHECKING:
    _follows: tuple[type[FTRecipeInterface], type[EvalRecipeInterface]] = (
        DistributedPPLEvalRecipe,
        DistributedPPLEvalRecipe,
    )


def run(argv: Sequence[str]) -> int:
    """Run the recipe with these arguments; return the exit code."""
    activity.begin()
    quieten_libraries()
    keep_to_owner()
    problem: ValueError | None = None
    settings: list[Settings] | None = None
    try:
        settings = settings_by_length(read_settings(argv))
    except ValueError as error:
        problem = error
    process = connect(settings[0].timeout_seconds if settings else KEYS["timeout_seconds"].default)

    def settle() -> list[Settings]:
        if settings is None:
            assert problem is not None
            raise problem
        return settings

    with ExitStack() as resources, fail_together(process, resources.close) as watch:
        world, settled = meet(process, settle, lambda settings: environment_facts(settings[0].written))
        watch.observe(world)
        recipe = DistributedPPLEvalRecipe(settled, world)
        resources.callback(recipe.cleanup)
        with long_lived_objects():
            recipe.setup()
        recipe.evaluate()
        recipe.save_checkpoint()
        while recipe.next_length():
            recipe.evaluate()
            recipe.save_checkpoint()
        return recipe.exit_code


@record
def main() -> None:
    """Entry point for `tune run`, `torchrun -m` and `python -m`."""
    guard_working_directory()
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    try:
        code = run(sys.argv[1:])
    except Stop as stop:
        code = stop.code
    else:
        if code:
            record_cause(Failure("this result and the baseline do not agree; the reasons are above", code))
    sys.exit(code)


if __name__ == "__main__":
    main()
