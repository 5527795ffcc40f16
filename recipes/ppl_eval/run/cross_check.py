"""``cross_check: N``: the first N windows by the other engine too, token for token.

Two libraries that share no code, and read the same files, agree to rounding, or one of them computes another
model. The other engine's model is built and checked before anything is scored, and filled after, on rank 0,
beside the model of the run: both must fit its device.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ppl_eval.checkpoints.folder import weights_folder
from ppl_eval.checkpoints.lazy_state_dict import check_state_dict, under_own_names
from ppl_eval.checkpoints.load import LoadedCheckpoint, load_state_dict
from ppl_eval.config.settings import Settings
from ppl_eval.models import live
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.families import OWN_NAMES
from ppl_eval.models.other_engine import torchtune_section, transformers_section
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.protocols.batches import WindowBatches
from ppl_eval.run.state import RunState
from ppl_eval.scoring import load
from ppl_eval.scoring.nll import score_batch

_ALONE = ParallelDims(1, 1, 1, 1, world_size=1)


def check_possible(settings: Settings, checkpoint: LoadedCheckpoint, placement: load.Placement) -> None:
    """Build the other engine's model without weights, and hold the checkpoint's names against it.

    Raises:
        ValueError: if there is no other engine for this model, or not for this run.
    """
    if settings.cross_check is None:
        return
    reason = None
    if live.is_lent():
        reason = "the model is in memory, and no checkpoint is there to read it from"
    elif placement.dims.forwards_are_shared:
        reason = "the model is split over ranks; give every process a copy, or run it on a smaller model"
    elif settings.quantizer is not None and "calibration" in settings.quantizer:
        reason = "the quantizer is calibrated; run it without"
    if reason is not None:
        raise ValueError(f"cross_check: {reason}, or leave cross_check out")
    decoder, other, _ = _other(settings, checkpoint, placement.dtype)
    tensors, _ = under_own_names(decoder, other.state_dict)
    check_state_dict(decoder, tensors, dtype=placement.dtype, notes=[])


def compare(state: RunState) -> dict[str, Any] | None:
    """Score the first windows by both engines; the run's own gives the bits that it gave before.

    Returns:
        The other engine, how many windows and tokens, the largest difference of a token's NLL, and the NLL of
        all, both in nats; None where nothing was asked for.
    """
    settings, wanted = state.settings, state.settings.cross_check
    if wanted is None:
        return None
    dtype = state.model.scorer.model.embed_unit().weight.dtype
    decoder, checkpoint, given = _other(settings, state.source.checkpoint, dtype)
    placement = load.Placement(state.device, dtype, _ALONE, None)
    other = load.load_model(decoder, checkpoint, given, placement).scorer
    batches = WindowBatches(state.inputs.plan, state.inputs.data, state.inputs.prefix_token)
    num_windows = num_tokens = 0
    largest, sums = 0.0, np.zeros(2)
    for index in state.share.batches:
        if num_windows == wanted:
            break
        batch = batches[index]
        here = slice(min(len(batch.window_ids_B), wanted - num_windows))
        own, others = (score_batch(scorer, batch, state.device) for scorer in (state.model.scorer, other))
        assert own.nll_BT is not None
        assert others.nll_BT is not None
        # np.max keeps a NaN.
        largest = float(np.max([largest, np.abs(own.nll_BT - others.nll_BT)[here].max(initial=0.0)]))
        num_windows += here.stop
        num_tokens += int(own.num_tokens_B[here].sum())
        sums += [own.nll_sum_B[here].sum(), others.nll_sum_B[here].sum()]
    return {
        "engine": decoder.engine,
        "num_windows": num_windows,
        "num_tokens": num_tokens,
        "largest_token_difference": largest if np.isfinite(largest) else str(largest),
        "nll_sum": float(sums[0]),
        "nll_sum_of_other": float(sums[1]),
    }


def note(found: dict[str, Any] | None) -> list[str]:
    """Return what a reader must know of ``compare``."""
    if found is None:
        return []
    largest = found["largest_token_difference"]
    shown = f"{largest:.1e}" if isinstance(largest, float) else largest
    return [
        f"cross_check: {found['engine']} scored the first {found['num_windows']:,} windows"
        f" ({found['num_tokens']:,} tokens) too; the largest difference of a token is {shown} nats, and the"
        f" sums are {found['nll_sum']:.6f} here and {found['nll_sum_of_other']:.6f} there"
    ]


def _other(
    settings: Settings, checkpoint: LoadedCheckpoint, dtype: torch.dtype
) -> tuple[Decoder, LoadedCheckpoint, Settings]:
    """Return the other engine's model on the meta device, its checkpoint, and the settings that name both."""
    folder = weights_folder(settings.checkpointer, [])
    described = checkpoint.hf_config
    own = str(settings.checkpointer.get("model_type"))
    try:
        if described is None:
            raise ValueError(f"{folder} has no config.json")
        sections = torchtune_section(described) if own == OWN_NAMES else transformers_section(folder)
        if sections is None:
            raise ValueError(f"torchtune has no model of type {described.get('model_type')!r}")
        config = copy.deepcopy(settings.config)
        config.model, config.checkpointer.model_type = sections
        given = replace(settings, config=config, model=config.model, checkpointer=config.checkpointer)
        opened = load_state_dict(given.checkpointer)
        decoder = load.build_on_meta(given, dtype)
        load.match_family(decoder, opened, given)
    except ValueError as error:
        raise ValueError(f"cross_check: the other engine cannot run this model: {error}") from error
    return decoder, opened, given
