"""The model that a run's model is compared with: opened, built and held against the run's, then filled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch

from ppl_eval.checkpoints.load import LoadedCheckpoint, load_state_dict
from ppl_eval.config.reference import settings_of_reference
from ppl_eval.config.settings import Settings
from ppl_eval.models import live
from ppl_eval.models.decoder import Decoder
from ppl_eval.scoring import load


@dataclass(frozen=True)
class Reference:
    """A reference before its weights are read.

    Attributes:
        settings: the run's, with the reference's model, checkpointer and quantizer.
        checkpoint: opened.
        decoder: on the meta device.
        config_check: verdict of the comparison with its config.json.
        notes: what the person must know about it.
    """

    settings: Settings
    checkpoint: LoadedCheckpoint
    decoder: Decoder
    config_check: str
    notes: tuple[str, ...]


@contextmanager
def about_reference() -> Iterator[None]:
    """Say of an error about a config's sections that those of the reference are meant."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"reference: {error}") from error


def read_reference(settings: Settings, dtype: torch.dtype) -> Reference | None:
    """Open the reference of a run, and build it on the meta device; None for a run without one.

    Raises:
        ValueError: if something is missing or does not fit.
    """
    own = settings_of_reference(settings)
    if own is None:
        return None
    if live.is_lent():
        raise ValueError("reference needs a model from a checkpoint, and this one was given in memory")
    with about_reference():
        checkpoint = load_state_dict(own.checkpointer)
        decoder = load.build_on_meta(own, dtype)
        verdict, notes = load.match_family(decoder, checkpoint, own)
    return Reference(own, checkpoint, decoder, verdict, (*checkpoint.notes, *notes))


def check_same_tokens(settings: Settings, decoder: Decoder, reference: Reference) -> list[str]:
    """See that an id is the same token to both models.

    Args:
        settings: the run's.
        decoder: the model that is evaluated.
        reference: its reference.

    Returns:
        Notes for the result, those of the reference among them.

    Raises:
        ValueError: if not.
    """
    ours, theirs = decoder.vocab_size, reference.decoder.vocab_size
    if ours != theirs:
        raise ValueError(
            f"the model's vocabulary has {ours} tokens, the reference's {theirs}: KL divergence compares"
            " distributions over one vocabulary. Models with different tokenizers can be compared in bits per"
            " byte: score each by itself, and hold one result against the other (docs/compare.md)"
        )
    folders = [Path(str(own.checkpointer.get("checkpoint_dir"))) for own in (settings, reference.settings)]
    files = [folder.expanduser() / "tokenizer.json" for folder in folders]
    notes = [f"reference: {note}" for note in reference.notes]
    if not all(file.is_file() for file in files):
        return [
            *notes,
            "reference: its tokenizer was not compared with the model's (that takes a tokenizer.json in both"
            " checkpoints)",
        ]
    if files[0].samefile(files[1]):
        return notes
    first, second = (_tokens_of(file) for file in files)
    differing = sorted(token for token in {*first, *second} if first.get(token) != second.get(token))
    if differing:
        shown = ", ".join(
            f"{token!r} ({first.get(token)} and {second.get(token)})" for token in differing[:3]
        )
        raise ValueError(
            f"the tokenizers of model and reference differ in {len(differing)} tokens: {shown}, by {files[0]}"
            f" and {files[1]}. KL divergence needs the same tokens; bits per byte do not (docs/compare.md)"
        )
    return notes


def _tokens_of(file: Path) -> dict[str, int]:
    try:
        return tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # what the library raises has no class of its own
        raise ValueError(f"{file} cannot be read: {error}") from error
