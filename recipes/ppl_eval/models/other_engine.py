"""Which engine computes a model that config.json describes: torchtune's where a family has the architecture,
and transformers'."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_eval.models.config_check import model_arguments
from ppl_eval.models.families import FAMILIES, OWN_NAMES, check_architecture, family_of

HF = "ppl_eval.models.hf.causal_lm"


def torchtune_section(described: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the section ``model`` and the checkpointer's ``model_type`` of torchtune's engine; None where no
    family has the architecture.

    Args:
        described: content of config.json.

    Raises:
        ValueError: if torchtune cannot express what it says.
    """
    if described.get("model_type") not in {family.architecture.model_type for family in FAMILIES}:
        return None
    check_architecture(described)
    model = model_arguments(described)
    return model, family_of(model["_component_"]).model_type


def transformers_section(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the section ``model`` and the checkpointer's ``model_type`` of transformers' engine."""
    return {"_component_": HF, "path": str(folder)}, OWN_NAMES
