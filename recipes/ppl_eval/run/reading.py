"""Reading what a run scores: the text, the model that the checkpoint describes, and its weights."""

import os
import time
from collections.abc import Callable, Sequence

import torch

from ppl_eval.checkpoints.load import LoadedCheckpoint
from ppl_eval.config.environment import choose_seed, kernel_notes
from ppl_eval.config.settings import Settings
from ppl_eval.distributed.process import launch_notes
from ppl_eval.distributed.process_group import be_patient, divided_searches
from ppl_eval.distributed.rendezvous import World
from ppl_eval.models.decoder import Decoder
from ppl_eval.run import cross_check
from ppl_eval.run.calibration_text import calibration_batches
from ppl_eval.run.inputs import read_inputs
from ppl_eval.run.reference import about_reference, check_same_tokens, read_reference
from ppl_eval.run.state import Source
from ppl_eval.scoring import load


def read_sources(
    runs: Sequence[tuple[Settings, World]],
    checkpoint: LoadedCheckpoint,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> tuple[Decoder, list[Source]]:
    """Build the checkpoint's model on the meta device, and read the text for each context length.

    Args:
        runs: the checked config and the processes, for each length; texts are tokenised by one process of
            each node.
        checkpoint: the opened checkpoint.
        dtype: of weights and activations.
        say: shows a line to the person.

    Raises:
        ValueError: if something is missing or does not fit.
    """
    begin = time.monotonic()
    settings, world = runs[0]
    seed, seed_note = choose_seed(settings.seed, checkpoint.recipe_state, settings.seed_check)
    decoder = load.build_on_meta(settings, dtype)
    verdict, model_notes = load.match_family(decoder, checkpoint, settings)
    launched = launch_notes(os.environ, len(world.nodes), world.world_size) + kernel_notes()
    for note in (*launched, *settings.notes):
        say(f"note: {note}")
    reference = read_reference(settings, dtype)
    compared = [] if reference is None else check_same_tokens(settings, decoder, reference)
    seeded = [seed_note] if seed_note else []
    common = (*launched, *settings.notes, *checkpoint.notes, *seeded, *model_notes, *compared)
    sources = []
    for own, apart in runs:
        inputs = read_inputs(own, apart)
        fit_notes = load.check_fit(
            decoder, inputs.protocol.max_seq_len, inputs.data, inputs.encoder, inputs.prefix_token
        )
        say(
            f"{inputs.data.num_tokens:,} tokens in {inputs.data.num_documents:,} documents:"
            f" {inputs.plan.num_windows:,} windows, {inputs.plan.num_batches:,} batches,"
            f" {inputs.expected_tokens:,} tokens to score"
        )
        notes = (*common, *inputs.notes, *fit_notes)
        seconds = time.monotonic() - begin
        if reference is not None:
            with about_reference():
                load.check_fit(
                    reference.decoder,
                    inputs.protocol.max_seq_len,
                    inputs.data,
                    inputs.encoder,
                    inputs.prefix_token,
                )
        sources.append(
            Source(checkpoint, verdict, inputs, seed, notes, tuple(model_notes), seconds, reference)
        )
    return decoder, sources


def fill_model(
    settings: Settings,
    world: World,
    source: Source,
    decoder: Decoder,
    placement: load.Placement,
) -> load.BuiltModel:
    """Load the weights into the model that ``read_sources`` built, quantised and split as the config says.

    Raises:
        ValueError: if checkpoint and model do not fit, or cannot be quantised or split so.
    """
    cross_check.check_possible(settings, source.checkpoint, placement)
    batches, notes = calibration_batches(settings, source.inputs, world)
    share = divided_searches(world, placement.device)
    reference = source.reference
    model = load.load_model(
        decoder,
        source.checkpoint,
        settings,
        placement,
        batches=batches,
        share=share,
        compared=reference is not None,
    )
    if reference is not None:
        with about_reference():
            batches, more = calibration_batches(reference.settings, source.inputs, world)
            model.reference = load.load_model(
                reference.decoder,
                reference.checkpoint,
                reference.settings,
                placement,
                batches=batches,
                share=share,
                compared=True,
            )
        notes += [f"reference: {note}" for note in (*more, *model.reference.notes)]
    # FSDP may have made groups of its own.
    be_patient(world)
    model.notes[:0] = notes
    return model
