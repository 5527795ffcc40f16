"""PEFT's adapter_config.json: which adapters are an update alpha / rank * B A of their base, which are not.

A key is read, known to leave the arithmetic of a merged adapter alone, or refused unless its value is empty:
PEFT grows keys, and one that changes the update must not be passed over.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppl_eval.config.files import read_json_object

# Of no effect on the merged weights: who made the file, how training went, and which modules got an update
# (the file of the weights names those itself).
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "r", "lora_dropout"),
    *("ensure_weight_tying", "megatron_core", "loftq_config", "corda_config", "eva_config"),
    *("lora_ga_config", "runtime_config", "qalora_group_size"),
}
READ = {"peft_type", "bias", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "use_dora"}
READ |= {"init_lora_weights"}
# Values of `init_lora_weights` that leave the base as it is. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ subtract
# the initial update from the base, or quantise it: the base on disk is not what the adapter was trained on.
# EVA sets A alone and shares out ranks, which its config then has as patterns.
UNCHANGED_BASE = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Scaling:
    """How the updates of an adapter are scaled.

    Attributes:
        alpha: ``lora_alpha``, or None where the file is absent or does not say.
        by_root: divide by the root of the rank (rsLoRA).
        alphas: alphas of single modules: a pattern of PEFT's, and the alpha.
        ranks: ranks of single modules, which the shapes must have.
        rank: rank of the others, or None.
        dora: whether every update has a magnitude.
    """

    alpha: float | None = None
    by_root: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    rank: int | None = None
    dora: bool = False

    def of_module(self, name: str, rank: int) -> tuple[float, float | None]:
        """Return (divisor, alpha) of the update of one module.

        Args:
            name: PEFT's name of the module, without the prefix of its weight file.
            rank: columns of B.

        Raises:
            ValueError: if the file says another rank.
        """
        stated = _matched(self.ranks, name, self.rank)
        if stated is not None and stated != rank:
            raise ValueError(
                f"adapter_config.json gives {name} rank {stated}, its factors have rank {rank}: is it the"
                " file that belongs to the adapter?"
            )
        return (math.sqrt(rank) if self.by_root else rank), _matched(self.alphas, name, self.alpha)


def read_scaling(path: Path) -> Scaling:
    """Read how updates are scaled; of an absent file nothing is known.

    Raises:
        ValueError: if the file asks for more than updates of linear layers, or has an unknown key.
    """
    if not path.is_file():
        return Scaling()
    config = read_json_object(path)
    initial = config.get("init_lora_weights")
    if initial not in UNCHANGED_BASE:
        raise ValueError(
            f"{path} has init_lora_weights {initial!r}, which changes the base model's weights before"
            " training: on the original base the adapter gives another model. Convert it with PEFT's"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge it with PEFT and"
            " score the merged model"
        )
    refused = {
        key: value
        for key, value in config.items()
        if key not in READ and key not in HARMLESS and value not in (None, False, [], {}, "")
    }
    for key, plain in (("bias", "none"), ("peft_type", "LORA")):
        if config.get(key, plain) != plain:
            refused[key] = config[key]
    if refused:
        raise ValueError(
            f"{path} asks for {refused}, which is not supported, or not known here and may change the"
            " arithmetic: merge the adapter with PEFT first"
        )
    alpha, rank = config.get("lora_alpha"), config.get("r")
    return Scaling(
        alpha=None if alpha is None else float(alpha),
        by_root=bool(config.get("use_rslora")),
        alphas=config.get("alpha_pattern") or {},
        ranks=config.get("rank_pattern") or {},
        rank=rank or None,
        dora=bool(config.get("use_dora")),
    )


def _matched(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, as PEFT's get_pattern_key does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
