"""What transformers calls a ``model_type``, and how it reads that type's config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppl_eval.models import hf_config
from ppl_eval.models.hf_config import HFConfig

Facts = dict[str, Any]


def _no_other_facts(config: HFConfig) -> Facts:
    return {}


@dataclass(frozen=True)
class Architecture:
    """What transformers calls one ``model_type``, and how it reads that type's config.json.

    Attributes:
        model_type: ``model_type`` in config.json.
        component: dotted path of the builder that has an argument for every constant in which models of this
            type differ; what an error message proposes.
        defaults: what transformers 5 assumes where config.json lacks the key.
        other_facts: the facts that it reads differently from ``hf_config.llama_facts``, from a config with
            its defaults filled in.
        gguf: ``general.architecture`` of its GGUF files, where ``checkpoints.gguf`` reads them.
        spelling: puts what it alone spells in its own way as other types spell it.
        nullable: keys of ``defaults`` that may be null in the file, which then means something else.
    """

    model_type: str
    component: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_facts: Callable[[HFConfig], Facts] = _no_other_facts
    gguf: str | None = None
    spelling: Callable[[HFConfig], HFConfig] = dict
    nullable: tuple[str, ...] = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")

    def facts(self, config: HFConfig) -> Facts:
        """Return what a config.json says, by its own keys, with transformers' defaults filled in."""
        never_null = [
            key for key, value in self.defaults.items() if value is not None and key not in self.nullable
        ]
        hf_config.check_nulls(config, never_null)
        filled = self.spelling({**self.defaults, **config})
        facts = hf_config.llama_facts(filled) | self.other_facts(filled)
        # transformers' other name for the same function.
        return facts | {"hidden_act": {"swish": "silu"}.get(facts["hidden_act"], facts["hidden_act"])}


def _gemma_facts(config: HFConfig) -> Facts:
    name = config.get("hidden_act") or "silu"
    return {
        # The legacy name "gelu" means the tanh form, as transformers reads it.
        "hidden_act": "gelu_pytorch_tanh" if name == "gelu" else name,
        "embedding scale": math.sqrt(hf_config.required(config, "hidden_size")),
        "norm weight is an offset from 1": True,
    }


def _gemma2_facts(config: HFConfig) -> Facts:
    return _gemma_facts(config) | {
        "hidden_act": config.get("hidden_activation") or "silu",
        "sliding_window": hf_config.windows_by_layer(config, lambda index: index % 2 == 0),
        "query_pre_attn_scalar": hf_config.required(config, "query_pre_attn_scalar"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention norms": "before and after",
        "feed-forward norms": "before and after",
    }


def _phi3_facts(config: HFConfig) -> Facts:
    return {
        "rope_scaling": hf_config.rope_scaling(config, aliases={"su": "longrope", "yarn": "longrope"}),
        "sliding_window": hf_config.same_window(config),
    }


def _qwen2_facts(config: HFConfig) -> Facts:
    first_window = config["max_window_layers"]
    used = config if config["use_sliding_window"] else {**config, "sliding_window": None}
    return {
        "sliding_window": hf_config.windows_by_layer(used, lambda index: index >= first_window),
        "query, key and value bias": True,
        "attention output bias": False,
    }


def _gemma3_facts(config: HFConfig) -> Facts:
    pattern = config["sliding_window_pattern"]
    hf_config.required(config, "sliding_window")
    windows = hf_config.windows_by_layer(config, lambda index: (index + 1) % pattern != 0)
    return _gemma2_facts(config) | {
        "sliding_window": windows,
        "query and key norms": "of each head",
        "rope_local_base_freq": float(config["rope_local_base_freq"]) if any(windows) else None,
    }


def _gemma3_spelling(config: HFConfig) -> HFConfig:
    """Put RoPE parameters by type of layer, as transformers 5 writes them, where older files have them."""
    plain = {key: value for key, value in config.items() if key != "rope_parameters"}
    by_type = config.get("rope_parameters") or {}
    unknown = set(by_type) - {"full_attention", "sliding_attention"}
    local = dict(by_type.get("sliding_attention") or {})
    if unknown or local.get("rope_type", "default") != "default":
        raise ValueError(f"config.json has rope_parameters {by_type}, which are none of Gemma 3")
    scaling = dict(by_type.get("full_attention") or {})
    stated = {
        "rope_theta": scaling.pop("rope_theta", None),
        "rope_local_base_freq": local.get("rope_theta"),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
    }
    for key, value in stated.items():
        if value is not None and plain.get(key) not in (None, value):
            raise ValueError(
                f"config.json states {key} twice, differently: {plain[key]} and, in rope_parameters, {value};"
                " leave the one that the model was trained with"
            )
        plain[key] = value if value is not None else plain.get(key)
    bases = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    return plain | {key: base for key, base in bases.items() if plain[key] is None}


def _granite_facts(config: HFConfig) -> Facts:
    return {
        "embedding scale": config["embedding_multiplier"],
        # The number whose inverse root multiplies the scores.
        "query_pre_attn_scalar": config["attention_multiplier"] ** -2,
        "residual_multiplier": config["residual_multiplier"],
        "logits_scaling": config["logits_scaling"],
    }


def _olmo2_facts(config: HFConfig) -> Facts:
    return {
        "attention norms": "after",
        "feed-forward norms": "after",
        "query and key norms": "over all heads",
    }


def _qwen3_facts(config: HFConfig) -> Facts:
    bias = bool(config.get("attention_bias", False))
    return _qwen2_facts(config) | {
        "query, key and value bias": bias,
        "attention output bias": bias,
        "query and key norms": "of each head",
    }


def _smollm3_facts(config: HFConfig) -> Facts:
    layers, interval = hf_config.required(config, "num_hidden_layers"), config["no_rope_layer_interval"]
    rotates = config.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(layers)]
    used = config if config["use_sliding_window"] else {**config, "sliding_window": None}
    return {
        "layers without positions": [index for index in range(layers) if not rotates[index]],
        "sliding_window": hf_config.windows_by_layer(used, lambda index: not rotates[index]),
    }


def _smollm3_spelling(config: HFConfig) -> HFConfig:
    """Fill in its own base, wherever the file would have it."""
    ropes = [config, *(config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))]
    return config if any("rope_theta" in rope for rope in ropes) else {**config, "rope_theta": 2e6}


LLAMA = Architecture(
    "llama",
    # Its builder has both arguments in which Llamas differ: the scaling of RoPE and the tied head.
    "torchtune.models.llama3_2.llama3_2",
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    gguf="llama",
)
MISTRAL = Architecture(
    "mistral",
    # torchtune's has no argument for the size of a head.
    "ppl_eval.models.mistral_nemo.mistral_nemo",
    {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 8, "sliding_window": 4096},
    lambda config: {"sliding_window": hf_config.same_window(config)},
    gguf="llama",
)
GEMMA = Architecture(
    "gemma",
    "torchtune.models.gemma.gemma",
    {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
    },
    _gemma_facts,
    gguf="gemma",
)
GEMMA2 = Architecture(
    "gemma2",
    "torchtune.models.gemma2.gemma2",
    {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
    },
    _gemma2_facts,
    gguf="gemma2",
)
PHI3 = Architecture(
    "phi3",
    # torchtune's has no argument for a tied head.
    "ppl_eval.models.phi4_mini.phi4_mini",
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "original_max_position_embeddings": 4096},
    _phi3_facts,
    gguf="phi3",
)
QWEN2 = Architecture(
    "qwen2",
    "torchtune.models.qwen2.qwen2",
    {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    _qwen2_facts,
    nullable=("sliding_window", "num_key_value_heads"),
    gguf="qwen2",
)
QWEN3 = Architecture(
    "qwen3",
    "ppl_eval.models.qwen3.qwen3",
    {**QWEN2.defaults, "head_dim": 128},
    _qwen3_facts,
    nullable=("sliding_window", "num_key_value_heads"),
    gguf="qwen3",
)
OLMO2 = Architecture(
    "olmo2",
    "ppl_eval.models.olmo2.olmo2",
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    _olmo2_facts,
)
GRANITE = Architecture(
    "granite",
    "ppl_eval.models.granite3.granite3",
    {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    _granite_facts,
)
SMOLLM3 = Architecture(
    "smollm3",
    "ppl_eval.models.smollm3.smollm3",
    {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },
    _smollm3_facts,
    nullable=("num_key_value_heads",),
    spelling=_smollm3_spelling,
)
GEMMA3 = Architecture(
    "gemma3_text",
    "ppl_eval.models.gemma3.gemma3",
    {
        "vocab_size": 262_208,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    _gemma3_facts,
    spelling=_gemma3_spelling,
)
