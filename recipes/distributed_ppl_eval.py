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
    if sys.path[0] in ("", os.getcwd()) and os.getcwd() != os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]

import gc
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.errors import record

from ppl_eval.config import activity
from ppl_eval.config.files import keep_to_owner
from ppl_eval.config.own_code import guard_working_directory
from ppl_eval.config.settings import KEYS, Settings, check_built, read_settings
from ppl_eval.distributed import process_group
from ppl_eval.distributed.failure import fail_together
from ppl_eval.distributed.outcome import Failure, Stop, record_cause
from ppl_eval.distributed.process import connect, launch_notes
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
    from ppl_eval.scoring.load import BuiltModel


class DistributedPPLEvalRecipe:
    """Evaluate perplexity, by torchtune's ``FTRecipeInterface`` and ``EvalRecipeInterface``.

    Args:
        settings: the checked config.
        world: the processes of the run.

    Attributes:
        state: what the run consists of; after ``setup``.
        scored: what scoring found; after ``evaluate``.
        exit_code: of the comparison with the baseline; after ``save_checkpoint``.
    """

    state: RunState
    scored: Scored
    exit_code: int

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings = settings
        self.world = world
        self._resources = ExitStack()
        self._metric_logger: Any = None

    def setup(self, **_: Any) -> None:
        """Form the process group, prepare tokens and plan, and load the model; everything that can be wrong
        is found here."""
        from torchtune.config import log_config
        from torchtune.training import set_seed
        from torchtune.utils import get_logger

        from ppl_eval.config import environment
        from ppl_eval.distributed import collectives
        from ppl_eval.parallel.parallel_dims import ParallelDims
        from ppl_eval.results.result import check_comparable
        from ppl_eval.run.facts import input_facts
        from ppl_eval.run.state import RunState
        from ppl_eval.run.weights import agree_on_weights

        settings, world = self.settings, self.world
        self._log = get_logger(settings.log_level)
        if world.rank == 0:
            log_config(recipe_name="DistributedPPLEvalRecipe", cfg=settings.config)
        world.agree("components", lambda: check_built(settings))
        device = world.agree(
            "device",
            lambda: environment.choose_device(settings.device, settings.backend),
            lambda device: {"backend": process_group.choose_backend(device, settings.backend)},
        )
        dtype = world.agree("dtype", lambda: environment.choose_dtype(settings.dtype, device))
        dims = world.agree("mesh", lambda: ParallelDims.from_settings(settings, world.world_size))
        self._resources.enter_context(process_group.process_group(world, device, settings.backend))
        ranks_of_nodes = [node.ranks for node in world.nodes]
        with process_group.naming_network(world, process_group.choose_backend(device, settings.backend)):
            self._add_over_ranks = collectives.add_over_ranks(
                ranks_of_nodes, world.rank, device, settings.aggregation.topology
            )
            self._mesh = dims.build_mesh(device.type)
            process_group.check_groups(self._add_over_ranks, self._mesh, world.rank)
        self._baseline = world.agree("output", self._prepare_output)
        decoder, source = world.agree(
            "inputs",
            lambda: self._read(dtype),
            lambda read: {
                "seed": read[1].seed,
                "checkpoint": read[1].checkpoint.identity,
                **input_facts(settings, read[1], device),
            },
        )
        world.agree("baseline", lambda: check_comparable(source.inputs, self._baseline))
        set_seed(source.seed)

        begin = time.monotonic()
        model = world.agree(
            "model",
            lambda: self._load_model(decoder, source, device, dtype, dims),
            lambda model: model.facts(),
        )
        load_seconds = time.monotonic() - begin
        weights_hash = agree_on_weights(world, model.weights, device)
        self.state = RunState(settings, world, device, dims, source, model, weights_hash, load_seconds)
        self._log_rank_zero(f"model loaded in {load_seconds:.1f} s: {model.num_parameters:,} parameters")
        self._open_ledger()

    def _prepare_output(self) -> Mapping[str, Any] | None:
        """Read the baseline, and keep other runs out of the output folder; rank 0 does."""
        from ppl_eval.results import baseline, ledger
        from ppl_eval.results.result import build_metric_logger

        if self.world.rank:
            return None
        other = baseline.prepare(self.settings)
        if self.settings.metric_logger is not None:
            self._metric_logger = build_metric_logger(self.settings.metric_logger)
            self._resources.callback(self._metric_logger.close)
        self._resources.callback(ledger.lock_output_dir(Path(self.settings.output_dir)).release)
        return other

    def _open_ledger(self) -> None:
        """Let files of other evaluations make room, and find what earlier runs of this one have scored."""
        from ppl_eval.results import ledger, previous, resume
        from ppl_eval.run.facts import plan_facts

        state, settings, world = self.state, self.settings, self.world
        output_dir, facts = Path(settings.output_dir), plan_facts(self.state)

        def make_room() -> list[str | None]:
            kept = resume.check(output_dir, facts, settings.resume) if world.local_rank == 0 else None
            key = ledger.plan_key(facts)
            moved = previous.set_aside(output_dir, key, settings.baseline) if world.rank == 0 else None
            return [kept, moved]

        for line in world.agree("previous", make_room):
            if line:
                self._log.info(line)
        self._ledger = world.agree(
            "ledger",
            lambda: ledger.open_ledger(output_dir, facts, world.rank, settings.position_buckets or 0),
        )
        self._resources.callback(self._ledger.close)
        done = resume.take_over(self._ledger, state.inputs.plan, world, state.device)
        world.agree("resume", lambda: resume.require(settings.resume, done, output_dir))
        self.state = replace(state, done=done)
        if line := resume.note(done, state.inputs.plan):
            self._log_rank_zero(line)

    def load_checkpoint(self, **_: Any) -> None:
        """Open the checkpoint; weights are read later, one by one."""
        from ppl_eval.checkpoints.load import load_state_dict

        self.checkpoint = load_state_dict(self.settings.checkpointer)

    def evaluate(self, **_: Any) -> None:
        """Score this rank's batches, then add up over all ranks."""
        from ppl_eval.results.progress import Progress
        from ppl_eval.results.token_spool import TokenSpool
        from ppl_eval.run import loop

        state = self.state
        activity.enter("scoring")
        expected = state.inputs.expected_tokens * (1 - state.num_done / state.inputs.plan.num_batches)
        progress = Progress(round(expected), state.dims.dp_degree, enabled=self.world.rank == 0)

        tokens = None
        if self.settings.per_token:
            tokens = TokenSpool(self._ledger.folder, self.world.rank, state.inputs.plan)

        def keep(batch: Batch, scores: WindowScores, records: Records, totals: Totals) -> None:
            if tokens is not None:
                tokens.append(batch, scores)
            self._ledger.append(records)
            progress.update(totals)

        sums = loop.score(state, loop.batches_of_rank(state), keep)
        progress.close()
        # A rank may be done long before others; a collective would not wait for them so patiently.
        self.world.agree("scored", lambda: None)
        self.scored = loop.reduce(state, sums, self._ledger.resumed, self._add_over_ranks)

    def train(self, **_: Any) -> None:
        """``FTRecipeInterface``'s name for ``evaluate``: nothing is trained."""
        self.evaluate()

    def save_checkpoint(self, **_: Any) -> None:
        """Write the result, print it, and hold it against the baseline: rank 0 does, the others wait."""
        from ppl_eval.results import result

        state, scored, world = self.state, self.scored, self.world
        own = self._ledger.own()
        result.write_records(state, own, self._add_over_ranks)
        result.write_tokens(state, self._ledger, self._add_over_ranks)
        rounded_nll = result.rounded_nll(state, own, self._add_over_ranks)
        self._ledger.close()
        row = result.rank_row(state, scored)
        per_rank = process_group.all_gather_rows(row, world.world_size, state.device)
        self.exit_code = world.agree(
            "result",
            lambda: (
                result.write_result(
                    state, scored, per_rank, rounded_nll, self._baseline, metric_logger=self._metric_logger
                )
                if world.rank == 0
                else 0
            ),
        )
        if world.local_rank == 0:
            self._ledger.remove()

    def cleanup(self, **_: Any) -> None:
        """Give back what setup took; safe to call at any time."""
        self._resources.close()

    def _read(self, dtype: torch.dtype) -> tuple[Any, Source]:
        """Open the checkpoint, build its model without weights, and read the text."""
        from ppl_eval.config.environment import choose_seed
        from ppl_eval.run.inputs import read_inputs
        from ppl_eval.run.state import Source
        from ppl_eval.scoring import load

        settings = self.settings
        begin = time.monotonic()
        self.load_checkpoint()
        checkpoint = self.checkpoint
        seed, seed_note = choose_seed(settings.seed, checkpoint.recipe_state, settings.seed_check)
        decoder = load.build_on_meta(settings, dtype)
        verdict, model_notes = load.match_family(decoder, checkpoint, settings)
        inputs = read_inputs(settings, self.world)
        fit_notes = load.check_fit(
            decoder, inputs.protocol.max_seq_len, inputs.data, inputs.encoder, inputs.prefix_token
        )
        launched = launch_notes(os.environ, len(self.world.nodes), self.world.world_size)
        for note in launched:
            self._log_rank_zero(f"note: {note}")
        seed_notes = [seed_note] if seed_note else []
        notes = (*launched, *checkpoint.notes, *seed_notes, *model_notes, *inputs.notes, *fit_notes)
        self._log_rank_zero(
            f"{inputs.data.num_tokens:,} tokens in {inputs.data.num_documents:,} documents:"
            f" {inputs.plan.num_windows:,} windows, {inputs.plan.num_batches:,} batches,"
            f" {inputs.expected_tokens:,} tokens to score"
        )
        return decoder, Source(
            checkpoint, verdict, inputs, seed, notes, tuple(model_notes), time.monotonic() - begin
        )

    def _load_model(
        self, decoder: Any, source: Source, device: torch.device, dtype: torch.dtype, dims: Any
    ) -> BuiltModel:
        from ppl_eval.run.calibration_text import calibration_batches
        from ppl_eval.scoring import load

        batches, notes = calibration_batches(self.settings, source.inputs, self.world)
        model = load.load_model(
            decoder,
            source.checkpoint,
            self.settings,
            load.Placement(device, dtype, dims, self._mesh),
            batches=batches,
            share=process_group.divided_searches(self.world, device),
        )
        model.notes[:0] = notes
        return model

    def _log_rank_zero(self, message: str) -> None:
        if self.world.rank == 0:
            self._log.info(message)


if TYPE_CHECKING:
    _follows: tuple[type[FTRecipeInterface], type[EvalRecipeInterface]] = (
        DistributedPPLEvalRecipe,
        DistributedPPLEvalRecipe,
    )


def _quieten_libraries() -> None:
    # Printed once per process by libraries about their own insides; nothing that a person can act on.
    for message in (
        "'set_vital' is deprecated",
        "Mismatch dtype between input and weight: input dtype = float",
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _long_lived_objects() -> Iterator[None]:
    # Imports and models make a million objects that live to the end. Looking through them for garbage, again
    # and again and once more at exit, takes a second and a half and finds none.
    gc.unfreeze()  # What an earlier run in this process left is garbage by now.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(argv: Sequence[str]) -> int:
    """Run the recipe with these arguments; return the exit code."""
    activity.begin()
    _quieten_libraries()
    keep_to_owner()
    problem: ValueError | None = None
    settings: Settings | None = None
    try:
        settings = read_settings(argv)
    except ValueError as error:
        problem = error
    process = connect(settings.timeout_seconds if settings else KEYS["timeout_seconds"].default)

    def settle() -> Settings:
        if settings is None:
            assert problem is not None
            raise problem
        return settings

    with ExitStack() as resources, fail_together(process, resources.close) as watch:
        world, settled = meet(process, settle, lambda settings: environment_facts(settings.written))
        watch.observe(world)
        recipe = DistributedPPLEvalRecipe(settled, world)
        resources.callback(recipe.cleanup)
        with _long_lived_objects():
            recipe.setup()
        recipe.evaluate()
        recipe.save_checkpoint()
        return recipe.exit_code


@record
def main() -> None:
    """Entry point for `tune run`, `torchrun -m` and `python -m`."""
    guard_working_directory()
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
