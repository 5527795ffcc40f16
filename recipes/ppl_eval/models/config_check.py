"""Is the built model the one that config.json describes? Every constant that changes arithmetic is compared.

torchtune reads next to nothing of config.json: a Llama 3.1 checkpoint in the llama3 builder loads without a
word and scores wrongly. Here the constants are read out of the built modules, not out of the builder's
arguments, and set against the file.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.config._utils import _get_component_from_path
from torchtune.modules import TransformerDecoder

from ppl_eval.models import families, hf_config, model_facts
from ppl_eval.models.hf_config import HFConfig

# Which builder argument sets a key; of several, the first that the builder has.
_ARGUMENTS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("embed_dim",),
    "intermediate_size": ("intermediate_dim",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("head_dim",),
    "rms_norm_eps": ("norm_eps",),
    "rope_theta": ("rope_base",),
    "rope_scaling": ("scale_factor",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "sliding_window": ("sliding_window_size",),
    "attn_logit_softcapping": ("hidden_capping_value",),
    "final_logit_softcapping": ("final_capping_value",),
    "query_pre_attn_scalar": ("query_pre_attn_scalar",),
    "embedding scale": ("embedding_multiplier",),
    "residual_multiplier": ("residual_multiplier",),
    "logits_scaling": ("logits_scaling",),
    "layers without positions": ("nope_layers",),
    "rope_local_base_freq": ("local_rope_base",),
}


@dataclass(frozen=True)
class Difference:
    """A constant in which the built model departs from config.json.

    Attributes:
        key: the key in config.json.
        expected: its value there.
        actual: what the model uses.
        remedy: what to type to remove the difference.
        stated_by: the file, or what else asks for the expected value.
        used_by: what has the actual one.
    """

    key: str
    expected: Any
    actual: Any
    remedy: str
    stated_by: str = "config.json"
    used_by: str = "the model"

    def __str__(self) -> str:
        """Return one line: key, both values, remedy."""
        return (
            f"{self.key}: {self.stated_by} says {self.expected}, {self.used_by} has {self.actual};"
            f" {self.remedy}"
        )


def check_config(
    model: TransformerDecoder, builder: str, config: HFConfig | None, model_type: str | None = None
) -> list[Difference]:
    """Compare the built and corrected model with the checkpoint's config.json.

    Args:
        model: the model, on any device, before quantisation and sharding.
        builder: the builder's dotted path, ``model._component_`` of the config.
        config: the checkpoint's config.json; None compares nothing but ``model_type``.
        model_type: the checkpointer's ``model_type``; None if the checkpointer needs none.

    Returns:
        Every difference, in the order of the facts.

    Raises:
        ValueError: if the family or the architecture is not supported, or config.json lacks a size.
    """
    family = families.family_of(builder)
    differences = []
    # Types that share a converter (LLAMA2, LLAMA3, MISTRAL, GEMMA, ...) load the same weights.
    alike = {other.model_type for other in families.FAMILIES if other.converter is family.converter}
    if model_type is not None and model_type not in alike:
        remedy = f"checkpointer.model_type={family.model_type}"
        differences.append(
            Difference(
                *("checkpointer.model_type", family.model_type, model_type, remedy),
                stated_by=f"model._component_={builder}",
                used_by="the checkpointer section",
            )
        )
    if config is None:
        return differences
    families.check_architecture(config)
    own_type = family.architecture.model_type
    if config["model_type"] != own_type:
        section = f"use this section:\n{model_section(config)}"
        source = hf_config.source(config)
        return [*differences, Difference("model_type", config["model_type"], own_type, section, source)]
    expected, actual = family.architecture.facts(config), model_facts.facts(model)
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        if key not in config.get(hf_config.UNSTATED, ()) and not _same(value, actual[key]):
            remedy, source = _remedy(key, value, builder, config), hf_config.source(config)
            differences.append(Difference(key, _brief(value), _brief(actual[key]), remedy, source))
    return differences


def completed(config: HFConfig, beside: HFConfig, notes: list[str]) -> HFConfig:
    """Return a config made from another file, completed by the config.json beside that file.

    Args:
        config: what the other file says.
        beside: config.json, which must say the same.
        notes: what was taken from config.json is appended here.

    Raises:
        ValueError: if the two contradict each other: every key, with both values.
    """
    source, own_type = hf_config.source(config), config["model_type"]
    found = [("model_type", own_type, beside.get("model_type", own_type))]
    if found[0][1] == found[0][2]:
        architecture = families.architecture_of(config)
        if config.get("sliding_window") is None and beside.get("sliding_window") is not None:
            config = {**config, "sliding_window": beside["sliding_window"]}
            notes.append(f"{source}: sliding_window={beside['sliding_window']} is config.json's")
        facts, others = architecture.facts(config), architecture.facts(beside)
        unstated = config.get(hf_config.UNSTATED, ())
        found = [(key, facts[key], others[key]) for key in facts if key not in unstated]
        added = {key: beside[key] for key in unstated if key in beside}
        config = {**config, **added, hf_config.UNSTATED: [key for key in unstated if key not in added]}
    lines = [
        f"  - {key}: {source} says {_brief(own)}, config.json says {_brief(other)}"
        for key, own, other in found
        if not _same(own, other)
    ]
    if lines:
        raise ValueError(
            f"{source} and the config.json beside it describe different models:\n"
            + "\n".join(lines)
            + "\nRemove config.json if it is not this file's, or take the file that it belongs to."
        )
    notes.append(f"{source}: its hyperparameters agree with the config.json beside it")
    return config


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=1e-9)
    return expected == actual


def _brief(value: Any) -> str:
    """Write a value in few characters: layer by layer lists and LongRoPE's factors are long."""
    if isinstance(value, list):
        if all(item == value[0] for item in value):
            return f"{value[0]} in every layer"
        return f"{value[:4]}... ({len(value)} values)" if len(value) > 4 else str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_brief(item)}" for key, item in value.items()) + "}"
    return str(value)


def _remedy(key: str, value: Any, builder: str, config: HFConfig) -> str:
    parameters = inspect.signature(_get_component_from_path(builder)).parameters
    if key == "rope_scaling" and not _torchtune_scales(value, config):
        return (
            f"torchtune 0.6.1 cannot build a model with RoPE scaled by {_brief(value)}, whatever the section:"
            " score this checkpoint with transformers or llama.cpp"
        )
    wanted = value
    if key == "sliding_window":
        wanted = next((window for window in value if window), None)
    if key == "rope_scaling":
        wanted = f"{value.get('factor', 1):g}" if value["rope_type"] != "longrope" else None
    own_head = ""
    if key == "tie_word_embeddings" and value:
        own_head = (
            " (if the weights have an lm_head.weight that differs from the embedding, config.json is wrong:"
            " set tie_word_embeddings to false in it and keep the builder)"
        )
    for argument in _ARGUMENTS.get(key, ()):
        if argument in parameters and wanted is not None:
            return f"set model.{argument}={wanted}{own_head}"
    return (
        f"{builder} has no argument for it{own_head}; use this section, and if it differs too, torchtune"
        f" 0.6.1 cannot build the model:\n{model_section(config)}"
    )


def _torchtune_scales(scaling: Mapping[str, Any], config: HFConfig) -> bool:
    """Return whether a builder computes it; Llama 3's has all but the factor written into it."""
    kind = scaling["rope_type"]
    constants = (1.0, 4.0, 8192)
    keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind == "llama3":
        return tuple(scaling[key] for key in keys) == constants
    own = {"phi3": "longrope", "gemma3_text": "linear"}
    return kind == "default" or kind == own.get(config["model_type"])


def model_section(config: HFConfig) -> str:
    """Return the ``model:`` section that builds what config.json describes, as far as torchtune can."""
    arguments = model_arguments(config)
    return "\n".join(["    model:", *(f"      {key}: {value}" for key, value in arguments.items())])


def model_arguments(config: HFConfig) -> dict[str, Any]:
    """Return component and arguments that build what config.json describes, as far as torchtune can.

    Raises:
        ValueError: if no component builds this architecture.
    """
    architecture = families.architecture_of(config)
    facts, component = architecture.facts(config), architecture.component
    values = {argument: facts[key] for key, names in _ARGUMENTS.items() for argument in names}
    values["sliding_window_size"] = next((window for window in facts["sliding_window"] if window), None)
    scaling = facts["rope_scaling"]
    has_factor = scaling["rope_type"] != "longrope" and _torchtune_scales(scaling, config)
    values["scale_factor"] = scaling.get("factor", 1) if has_factor else 1
    values["attention_multiplier"] = facts["query_pre_attn_scalar"] ** -0.5
    values["global_layers"] = [i for i, window in enumerate(facts["sliding_window"]) if window is None]
    values["max_seq_len"] = config.get("max_position_embeddings", 4096)
    parameters = inspect.signature(_get_component_from_path(component)).parameters
    return {"_component_": component, **{name: values[name] for name in parameters if name in values}}


def verify(
    model: TransformerDecoder,
    builder: str,
    config: HFConfig | None,
    mode: str = "error",
    model_type: str | None = None,
) -> tuple[str, list[str]]:
    """Check the model against config.json and act on it: the call that a recipe makes.

    Args:
        model: see ``check_config``.
        builder: see ``check_config``.
        config: see ``check_config``.
        mode: ``error``, ``warn`` or ``off``.
        model_type: see ``check_config``.

    Returns:
        The verdict for the result (``checked``, ``differs``, ``unchecked`` without a config.json, ``off``)
        and notes.

    Raises:
        ValueError: for ``error`` with any difference: all of them, each with what mends it; or as
            ``check_config`` does.
    """
    if mode == "off":
        return "off", ["config_check: off, so the model was not compared with config.json"]
    lines = [str(difference) for difference in check_config(model, builder, config, model_type)]
    if mode == "error" and lines:
        listed = "\n".join(f"  - {line}" for line in lines)
        raise ValueError(
            f"the built model differs from the checkpoint in {len(lines)} constant(s), so its "
            f"perplexity would be another model's:\n{listed}\nSet config_check=warn to score it all the same."
        )
    notes = [f"config_check: {line}" for line in lines]
    if config is None:
        return "unchecked", [*notes, "config_check: unchecked, because the checkpoint has no config.json"]
    return ("differs" if notes else "checked"), notes
