"""The text that a calibrated quantiser looks at: windows of another data set, cut by the run's protocol."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from ppl_eval.config import paths
from ppl_eval.config.components import instantiate
from ppl_eval.config.settings import Settings
from ppl_eval.data import token_data as tokens
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.distributed.rendezvous import World
from ppl_eval.protocols.batches import WindowBatches
from ppl_eval.protocols.plan import make_plan
from ppl_eval.quantization.awq import COMPONENT
from ppl_eval.run.inputs import Inputs

KEYS = {"dataset", "num_windows"}


def calibration_batches(
    settings: Settings, inputs: Inputs, world: World
) -> tuple[list[torch.Tensor] | None, list[str]]:
    """Return the windows that `quantizer.calibration` asks for, one a batch.

    Returns:
        tokens_BT of each batch, or None for a quantiser that is not calibrated; and notes.

    Raises:
        ValueError: the section lacks a key or has one too many, or the text is shorter than one window.
    """
    quantizer = settings.quantizer
    if quantizer is None or quantizer._component_ != COMPONENT:
        return None, []
    section = _check_section(quantizer.get("calibration"))
    source = instantiate("quantizer.calibration.dataset", section["dataset"])
    protocol = inputs.protocol

    def prepare() -> str:
        request = EncodeRequest(inputs.encoder, protocol.join, protocol.bos, protocol.word_separator)
        return str(tokens.prepare_tokens(source, request, paths.home() / "tokens"))

    data = tokens.open_tokens(Path(world.once_per_node("calibration tokens", prepare)))
    plan = make_plan(protocol, data.offsets_D1, 1, section["num_windows"])
    windows = WindowBatches(plan, data, inputs.prefix_token)
    notes = []
    if plan.num_windows < section["num_windows"]:
        notes.append(
            f"quantizer.calibration asks for {section['num_windows']} windows, its text has "
            f"{plan.num_windows}"
        )
    if data.fingerprint == inputs.data.fingerprint:
        notes.append(
            "the quantiser was calibrated on the very text that is scored: the perplexity flatters it; set "
            "quantizer.calibration.dataset to another text"
        )
    # Without the padding that batches have: scoring masks it, calibration would take it for text.
    num_inputs = plan.windows(0, plan.num_windows).num_inputs.tolist()
    return [windows[i].tokens_BT[:, :width] for i, width in enumerate(num_inputs)], notes


def _check_section(section: Any) -> Mapping[str, Any]:
    if not isinstance(section, Mapping) or set(section) != KEYS:
        found = sorted(map(str, section)) if isinstance(section, Mapping) else section
        raise ValueError(f"quantizer.calibration must have the keys dataset and num_windows; it is {found}")
    num_windows = section["num_windows"]
    if not isinstance(section["dataset"], DictConfig) or "_component_" not in section["dataset"]:
        raise ValueError(
            "quantizer.calibration.dataset must be a section with a _component_, as `dataset` is"
        )
    if not isinstance(num_windows, int) or isinstance(num_windows, bool) or num_windows < 1:
        raise ValueError(
            f"quantizer.calibration.num_windows is {num_windows!r}; it must be a whole number from 1"
        )
    return section
