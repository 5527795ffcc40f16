"""Perplexity of a language model, the same bits on one process and on a thousand.

    tune run distributed_ppl_eval --config smollm2/135M_ppl
    tune run --nproc_per_node 8 distributed_ppl_eval --config llama3_1/8B_ppl batch_size=4

Documents become windows, windows batches, and batches a plan that does not know how many ranks there are.
Each rank scores the batches that are its own, adds NLL and tokens up in integers, and one reduction at the
end joins the sums: see ``ppl_eval``, one idea a module.
"""

import gc
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from ppl_eval.config.settings import KEYS, Settings, read_settings
from ppl_eval.distributed import process_group as distributed
from ppl_eval.distributed.failure import fail_together
from ppl_eval.distributed.rendezvous import FIRST_PHASE, Stop, World, connect, environment_facts

# torch models, torchtune and data libraries are imported in `setup`: a typing mistake in a config is told
# before seconds of imports.


class DistributedPPLEvalRecipe:
    """Evaluates perplexity; follows torchtune's ``FTRecipeInterface`` with ``evaluate`` in the place of
    ``train``.

    Args:
        settings: the checked config.
        world: the processes of the run.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings = settings
        self.world = world
        self.notes: list[str] = []
        self.timing: dict[str, float] = {}
        self._resources = ExitStack()

    def setup(self) -> None:
        """Form the process group, prepare tokens and plan, and load the model; everything that can be wrong
        is found here."""
        import torch
        from torchtune import training, utils

        from ppl_eval.config import environment
        from ppl_eval.distributed import collectives as aggregation
        from ppl_eval.parallel.parallel_dims import ParallelDims

        settings, world = self.settings, self.world
        self._log = utils.get_logger(settings.log_level)
        self.device = world.agree(
            "device",
            lambda: environment.choose_device(settings.device, settings.backend),
            lambda device: {"backend": distributed.choose_backend(device, settings.backend)},
        )
        self.dtype: torch.dtype = world.agree(
            "dtype", lambda: environment.choose_dtype(settings.dtype, self.device)
        )
        self.dims = world.agree("mesh", lambda: ParallelDims.from_settings(settings, world.world_size))
        self._resources.enter_context(distributed.process_group(world, self.device, settings.backend))
        self.mesh = self.dims.build_mesh(self.device.type)
        topology = settings.aggregation["topology"]
        ranks_of_nodes = [node.ranks for node in world.nodes]
        self.add_over_ranks = aggregation.add_over_ranks(ranks_of_nodes, world.rank, self.device, topology)
        world.agree("inputs", self._read_inputs, lambda _: self._facts())
        training.set_seed(self.seed)

        begin = time.monotonic()
        self.model = world.agree("model", self._load_model, lambda model: model.facts())
        self.notes += self.model.notes
        self.timing["load_seconds"] = time.monotonic() - begin
        self.parallel = {**asdict(self.dims), "num_nodes": len(world.nodes)}
        self._log_rank_zero(
            f"model loaded in {self.timing['load_seconds']:.1f} s: {self.model.num_parameters:,} parameters"
        )

    def load_checkpoint(self) -> None:
        """Open the checkpoint (weights are read later, one by one) and settle the seed."""
        from ppl_eval.checkpoints.load import load_state_dict
        from ppl_eval.config.environment import choose_seed

        self.checkpoint = load_state_dict(self.settings.checkpointer)
        self.notes += self.checkpoint.notes
        self.seed, note = choose_seed(
            self.settings.seed, self.checkpoint.recipe_state, self.settings.seed_check
        )
        self.notes += [note] if note else []

    def evaluate(self) -> None:
        """Score this rank's batches, then add up over all ranks."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        from ppl_eval.metrics.accumulator import Tally
        from ppl_eval.metrics.totals import FloatSum, resolve_precision
        from ppl_eval.protocols.batches import WindowBatches, expected_lanes
        from ppl_eval.protocols.sampler import ExactDistributedSampler
        from ppl_eval.results.ledger import records_of
        from ppl_eval.results.progress import Progress
        from ppl_eval.scoring import concurrency as lanes
        from ppl_eval.scoring.nll import check_finite, score_batch

        world, settings, dims = self.world, self.settings, self.dims
        plan, data, expected_tokens = self.inputs.plan, self.inputs.data, self.inputs.expected_tokens
        self.tally = Tally(plan, data, settings)
        totals = self.tally.run.totals
        self.precision = resolve_precision(settings.aggregation["precision"], expected_tokens)
        rounded_nll = None if self.precision == "exact" else FloatSum(self.precision)
        dp_rank, counted = dims.dp_rank(world.rank), dims.is_counted(world.rank)
        # Shards are gathered in every forward, so ranks that share them make the same number of forwards.
        sampler = ExactDistributedSampler(
            plan.num_batches, dims.dp_degree, dp_rank, equal_steps=dims.dp_shard > 1
        )
        loader = StatefulDataLoader(
            WindowBatches(plan, data, self.inputs.prefix_token),
            batch_size=None,
            sampler=sampler,
            num_workers=0,
        )
        score = partial(score_batch, self.model.scorer, device=self.device)
        alone = not (dims.forwards_are_shared or settings.compile)
        batch_tokens = plan.batch_size * plan.protocol.max_seq_len
        num_lanes = lanes.number_of_lanes(self.device, alone, batch_tokens)
        progress = Progress(expected_tokens // dims.dp_degree, dims.dp_degree, enabled=world.rank == 0)

        begin = time.monotonic()
        for batch, scores in lanes.map_in_lanes(score, loader, len(sampler), num_lanes):
            check_finite(batch, scores, world.where)
            if not counted:
                continue  # A peer scored the same windows, and counts them.
            self.tally.add(batch, scores)
            self.ledger.append(records_of(batch, scores))
            if rounded_nll is not None:
                rounded_nll.add(scores.nll_sum_B)
            progress.update(totals)
        progress.close()
        self.timing["score_seconds"] = time.monotonic() - begin
        self.tokens_here = totals.num_tokens
        if counted:
            totals.expected_lanes = expected_lanes(plan, data, dp_rank, dims.dp_degree)

        # A rank may rightly be done long before others; a collective would not wait for them so patiently.
        world.agree("scored", lambda: None)
        begin = time.monotonic()
        self.tally.reduce(self.add_over_ranks)
        self.totals = self.tally.run.totals
        self.rounded_nll = None
        if rounded_nll is not None:
            self.rounded_nll = float(self.add_over_ranks(rounded_nll.value.reshape(1))[0])
        self.timing["reduce_seconds"] = time.monotonic() - begin
        self.tally.check_coverage(expected_tokens, plan.num_windows)

    def save_checkpoint(self) -> int:
        """Write the result, print it, and hold it against the baseline: rank 0 does, the others wait.

        Returns:
            The exit code.
        """
        from ppl_eval.results import result as results

        results.write_records(self)
        self.ledger.close()
        per_rank = distributed.all_gather_rows(results.rank_row(self), self.world.world_size, self.device)
        code = self.world.agree(
            "result", lambda: results.write_result(self, per_rank) if self.world.rank == 0 else 0
        )
        if self.world.local_rank == 0:
            self.ledger.remove()
        return code

    def cleanup(self) -> None:
        """Give back what setup took; safe to call at any time."""
        self._resources.close()

    def _read_inputs(self) -> None:
        from ppl_eval.results import baseline, ledger
        from ppl_eval.results import table as report
        from ppl_eval.run.inputs import read_inputs
        from ppl_eval.scoring import load as models

        settings, world = self.settings, self.world
        begin = time.monotonic()
        if world.rank == 0:
            report.check_output_dir(Path(settings.output_dir))
            self.baseline = baseline.read_result(settings.baseline) if settings.baseline else {}
        self.load_checkpoint()
        self.decoder = models.build_on_meta(settings, self.dtype)
        self.config_check, notes = models.match_family(self.decoder, self.checkpoint, settings)
        self.inputs = inputs = read_inputs(settings, world)
        self.notes += [*notes, *inputs.notes]
        models.check_fit(self.decoder, inputs.protocol.max_seq_len, inputs.encoder.vocab_size)
        self.ledger = ledger.open_ledger(Path(settings.output_dir), ledger.plan_facts(self), world.rank)
        self._resources.callback(self.ledger.close)
        self.timing["data_seconds"] = time.monotonic() - begin
        self._log_rank_zero(
            f"{inputs.data.num_tokens:,} tokens in {inputs.data.num_documents:,} documents:"
            f" {inputs.plan.num_windows:,} windows, {inputs.plan.num_batches:,} batches,"
            f" {inputs.expected_tokens:,} tokens to score"
        )

    def _load_model(self) -> Any:
        from ppl_eval.run.calibration_text import calibration_batches
        from ppl_eval.scoring import load as models

        batches, notes = calibration_batches(self.settings, self.inputs, self.world)
        self.notes += notes
        return models.load_model(
            self.decoder,
            self.checkpoint,
            self.settings,
            self.device,
            self.dtype,
            self.dims,
            self.mesh,
            batches,
            distributed.divided_searches(self.world, self.device),
        )

    def _facts(self) -> dict[str, Any]:
        data = self.inputs.data.fingerprint
        return {"seed": self.seed, "checkpoint": self.checkpoint.identity, "data": data}

    def _log_rank_zero(self, message: str) -> None:
        if self.world.rank == 0:
            self._log.info(message)


def _quieten_libraries() -> None:
    # Said once per process by libraries about their own insides; nothing that a person running an evaluation
    # can act on.
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
    """Run the recipe with these arguments; returns the exit code."""
    _quieten_libraries()
    problem: ValueError | None = None
    try:
        settings = read_settings(argv)
    except ValueError as error:
        problem = error
    world = connect(KEYS["timeout_seconds"].default if problem else settings.timeout_seconds)

    def settled() -> Settings:
        if problem is not None:
            raise problem
        return settings

    with ExitStack() as resources, fail_together(world, resources.close):
        world.check_world_size()
        world.agree(FIRST_PHASE, settled, lambda s: environment_facts(s.written))
        recipe = DistributedPPLEvalRecipe(settings, world)
        resources.callback(recipe.cleanup)
        with _long_lived_objects():
            recipe.setup()
        recipe.evaluate()
        return recipe.save_checkpoint()


@record
def main() -> None:
    """Entry point for `tune run`, `torchrun -m` and `python -m`."""
    try:
        code = run(sys.argv[1:])
    except Stop as stop:
        code = stop.code
    except Exception:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            # torchrun shows what @record writes there; the interpreter would show it a second time.
            sys.excepthook = lambda *_: None
        raise
    sys.exit(code)


if __name__ == "__main__":
    main()
