"""What a run finds in its output folder: other evaluations make room, its own earlier runs are continued."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppl_eval.config.components import instantiate
from ppl_eval.config.settings import Settings
from ppl_eval.distributed.rendezvous import World
from ppl_eval.metrics.window_records import form_of
from ppl_eval.results import baseline, ledger, previous, resume, status
from ppl_eval.results.ledger import Ledger
from ppl_eval.run.facts import plan_facts
from ppl_eval.run.share import share_of
from ppl_eval.run.state import NOTHING_DONE, RunState, Source


def prepare(settings: Settings, world: World, resources: ExitStack) -> tuple[Mapping[str, Any] | None, Any]:
    """Read the baseline, build the metric logger, and keep other runs out of the output folder; rank 0 does.

    Returns:
        The baseline and the metric logger, None each where there is none.

    Raises:
        ValueError: if the baseline cannot be read, the logger cannot be built, its package being missing for
            one, or the folder cannot be written or is in use.
    """
    if world.rank:
        status.begin(settings, world, resources)
        return None, None
    other, metric_logger = baseline.prepare(settings), None
    if settings.metric_logger is not None and settings.part is None:
        metric_logger = instantiate("metric_logger", settings.metric_logger)
        resources.callback(metric_logger.close)
    resources.callback(ledger.lock_output_dir(Path(settings.output_dir)).release)
    status.begin(settings, world, resources)
    return other, metric_logger


def open_ledger(state: RunState, resources: ExitStack, say: Callable[[str], None]) -> tuple[RunState, Ledger]:
    """Let files of other evaluations make room, and find what earlier runs of this one have scored.

    Args:
        state: the run.
        resources: gets what must be closed.
        say: shows a line to the person.

    Returns:
        The run with what is done, and its ledger.

    Raises:
        ValueError: if ``resume`` does not allow what is there.
    """
    settings, world = state.settings, state.world
    output_dir, facts = Path(settings.output_dir), plan_facts(state)

    def make_room() -> list[str | None]:
        kept = resume.check(output_dir, facts, settings.resume) if world.local_rank == 0 else None
        key = ledger.plan_key(facts)
        moved = previous.set_aside(output_dir, key, settings.baseline) if world.rank == 0 else None
        return [kept, moved]

    for line in world.agree("previous", make_room):
        if line:
            say(line)
    opened = world.agree(
        "ledger",
        lambda: ledger.open_ledger(output_dir, facts, world.rank, form_of(settings)),
    )
    resources.callback(opened.close)
    done = resume.take_over(opened, state, world)
    world.agree("resume", lambda: resume.require(settings.resume, done, output_dir))
    state = replace(state, done=done)
    if done.any() and world.rank == 0:
        num_batches = len(state.share.batches)
        say(f"resumed: {state.num_done:,} of {num_batches:,} batches were scored by earlier runs")
    return state, opened


def take_up(
    state: RunState,
    own: tuple[Settings, World],
    source: Source,
    resources: ExitStack,
    say: Callable[[str], None],
) -> tuple[Mapping[str, Any] | None, RunState, Ledger]:
    """Go on to another source with the loaded model.

    Args:
        state: the run so far.
        own: config and processes of the new source.
        source: what is to be scored.
        resources: gets what must be closed.
        say: shows a line to the person.

    Returns:
        The baseline, the run with what is done, and its ledger.
    """
    settings, world = own
    other, _ = world.agree("output", lambda: prepare(settings, world, resources))
    share = share_of(settings.part, source.inputs)
    state = replace(state, settings=settings, world=world, source=source, share=share, done=NOTHING_DONE)
    return other, *open_ledger(state, resources, say)
