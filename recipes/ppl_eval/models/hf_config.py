"""Reading Hugging Face's config.json: one meaning for its old and new spellings and for the keys it leaves
out.

Both spellings of RoPE occur: `rope_theta` with `rope_scaling` before transformers 5, `rope_parameters` since.
A key that a file omits has transformers' default of that model type, not of the file's author.
"""

import math
from collections.abc import Mapping
from typing import Any

HFConfig = Mapping[str, Any]

# What transformers (5.x) assumes when config.json lacks the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "mistral": {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "gemma": {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": {
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
    "phi3": {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "original_max_position_embeddings": 4096,
    },
    "qwen2": {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
}


def get(config: HFConfig, key: str, default: Any = None) -> Any:
    """The value of a key, or transformers' default for this model type, or `default`."""
    if key in config:
        return config[key]
    return DEFAULTS.get(config.get("model_type", ""), {}).get(key, default)


def required(config: HFConfig, key: str) -> Any:
    """The value of a key that no default can stand in for.

    Raises:
        ValueError: If config.json lacks it.
    """
    value = get(config, key)
    if value is None:
        raise ValueError(f"config.json has no {key!r}; is it the file that belongs to the checkpoint?")
    return value


def head_dim(config: HFConfig) -> int:
    """Size of an attention head."""
    return get(config, "head_dim") or required(config, "hidden_size") // required(
        config, "num_attention_heads"
    )


def activation(config: HFConfig) -> str:
    """Activation of the feed-forward; Gemma's legacy "gelu" means the tanh form, as transformers reads it."""
    key = "hidden_activation" if config.get("model_type") == "gemma2" else "hidden_act"
    name = get(config, key) or "silu"
    return "gelu_pytorch_tanh" if config.get("model_type") == "gemma" and name == "gelu" else name


def _rope(config: HFConfig) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def rope_theta(config: HFConfig) -> float:
    """RoPE base."""
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def partial_rotary_factor(config: HFConfig) -> float:
    """Rotated share of a head."""
    return float(_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def rope_scaling(config: HFConfig) -> dict[str, Any]:
    """RoPE scaling in one spelling: `rope_type` and, for llama3 and longrope, every parameter of theirs.

    A llama3 or linear scaling by 1 is "default". Types that torchtune cannot express keep their parameters as
    they stand.
    """
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if config.get("model_type") == "phi3" and kind in ("su", "yarn"):  # transformers reads these names so
        kind = "longrope"
    if kind == "default" or (kind in ("llama3", "linear") and float(required(rope, "factor")) == 1.0):
        return {"rope_type": "default"}
    if kind not in ("llama3", "longrope"):
        rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type", "rope_type")}
        return {"rope_type": kind, **rest}
    # Phi-3 keeps the original length beside rope_scaling, Llama 3 inside it.
    original = get(config, "original_max_position_embeddings") if kind == "longrope" else None
    original = original or rope.get("original_max_position_embeddings")
    original = original or required(config, "max_position_embeddings")
    if kind == "llama3":
        factors = {
            key: float(required(rope, key)) for key in ("factor", "low_freq_factor", "high_freq_factor")
        }
        return {"rope_type": kind, **factors, "original_max_position_embeddings": int(original)}
    factor = rope.get("factor") or required(config, "max_position_embeddings") / original
    default_attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "rope_type": kind,
        "short_factor": [float(value) for value in required(rope, "short_factor")],
        "long_factor": [float(value) for value in required(rope, "long_factor")],
        "original_max_position_embeddings": int(original),
        "attention_factor": float(rope.get("attention_factor") or default_attention),
    }


def sliding_windows(config: HFConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None where a layer sees everything before it.

    `layer_types` decides where the file has it; else Gemma 2 alternates, beginning with a window, Qwen 2
    slides from `max_window_layers` on if `use_sliding_window`, and Mistral and Phi-3 slide everywhere.
    """
    model_type, layers = config.get("model_type"), int(required(config, "num_hidden_layers"))
    window = get(config, "sliding_window")
    if window is None or (model_type == "qwen2" and not config.get("use_sliding_window", False)):
        return [None] * layers
    if model_type in ("gemma2", "qwen2"):
        kinds = config.get("layer_types")
        if kinds is not None:
            slides = [kind == "sliding_attention" for kind in kinds]
        elif model_type == "gemma2":
            slides = [index % 2 == 0 for index in range(layers)]
        else:
            slides = [index >= config.get("max_window_layers", 28) for index in range(layers)]
        return [int(window) if slide else None for slide in slides]
    return [int(window) if model_type in ("mistral", "phi3") else None] * layers


def facts(config: HFConfig) -> dict[str, Any]:
    """What config.json says, by its own keys, with transformers' defaults filled in."""
    model_type = config["model_type"]
    gemma = model_type in ("gemma", "gemma2")
    width, heads = (
        required(config, "hidden_size"),
        required(config, "num_attention_heads"),
    )
    scale = required(config, "query_pre_attn_scalar") if model_type == "gemma2" else head_dim(config)
    attention_bias = bool(config.get("attention_bias", False))
    return {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": required(config, "intermediate_size"),
        "num_hidden_layers": required(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": get(config, "num_key_value_heads") or heads,
        "head_dim": head_dim(config),
        "hidden_act": activation(config),
        "rms_norm_eps": get(config, "rms_norm_eps"),
        "tie_word_embeddings": bool(get(config, "tie_word_embeddings", False)),
        "rope_theta": rope_theta(config),
        "rope_scaling": rope_scaling(config),
        "rotary_dim": int(head_dim(config) * partial_rotary_factor(config)),
        "sliding_window": sliding_windows(config),
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": get(config, "attn_logit_softcapping") if model_type == "gemma2" else None,
        "final_logit_softcapping": get(config, "final_logit_softcapping") if model_type == "gemma2" else None,
        "query, key and value bias": True if model_type == "qwen2" else attention_bias,
        "attention output bias": False if model_type == "qwen2" else attention_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "embedding scale": math.sqrt(width) if gemma else 1.0,
        "norm weight is an offset from 1": gemma,
        "feed-forward norms": "before and after" if model_type == "gemma2" else "before",
    }
