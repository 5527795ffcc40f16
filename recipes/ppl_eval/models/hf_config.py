"""Reading Hugging Face's config.json: one meaning for its old and new spellings.

Both spellings of RoPE occur: ``rope_theta`` with ``rope_scaling`` before transformers 5, ``rope_parameters``
since. The functions expect the file with the keys that it omits filled in: those have the defaults of
transformers for that ``model_type``, which are in the table of ``families``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

HFConfig = Mapping[str, Any]


def required(config: HFConfig, key: str) -> Any:
    """Return the value of a key that no default can stand in for.

    Raises:
        ValueError: if config.json lacks it.
    """
    value = config.get(key)
    if value is None:
        raise ValueError(f"config.json has no {key!r}; is it the file that belongs to the checkpoint?")
    return value


def head_dim(config: HFConfig) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or required(config, "hidden_size") // required(
        config, "num_attention_heads"
    )


def rope_theta(config: HFConfig) -> float:
    """Return the RoPE base."""
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def partial_rotary_factor(config: HFConfig) -> float:
    """Return the rotated share of a head."""
    return float(_rope(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def rope_scaling(config: HFConfig, aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return RoPE scaling in one spelling: ``rope_type`` and, for llama3 and longrope, all its parameters.

    A llama3 or linear scaling by 1 is "default". Types that torchtune cannot express keep their parameters as
    they are.

    Args:
        config: the file.
        aliases: names under which transformers reads another type for this ``model_type``.
    """
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = (aliases or {}).get(kind, kind)
    if kind == "default" or (kind in ("llama3", "linear") and float(required(rope, "factor")) == 1.0):
        return {"rope_type": "default"}
    if kind not in ("llama3", "longrope"):
        rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type", "rope_type")}
        return {"rope_type": kind, **rest}
    # Phi-3 keeps the original length beside rope_scaling, Llama 3 inside it.
    original = config.get("original_max_position_embeddings") if kind == "longrope" else None
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


def same_window(config: HFConfig) -> list[int | None]:
    """Return the attention window of every layer, in tokens, where all have ``sliding_window``."""
    window = config.get("sliding_window")
    return [None if window is None else int(window)] * int(required(config, "num_hidden_layers"))


def windows_by_layer(config: HFConfig, slides: Callable[[int], bool]) -> list[int | None]:
    """Return the attention window of every layer, in tokens; None where it sees everything before it.

    Args:
        config: the file, whose ``layer_types`` decides where it has one.
        slides: whether the layer of an index has a window where the file does not say.
    """
    window, layers = config.get("sliding_window"), int(required(config, "num_hidden_layers"))
    if window is None:
        return [None] * layers
    kinds = config.get("layer_types")
    has_window = (
        [slides(index) for index in range(layers)]
        if kinds is None
        else [kind == "sliding_attention" for kind in kinds]
    )
    return [int(window) if has else None for has in has_window]


def llama_facts(config: HFConfig) -> dict[str, Any]:
    """Return what a file says, by its own keys, as transformers' Llama reads it.

    The other architectures differ from these facts in a few keys: see ``families.Architecture``.
    """
    width, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    return {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": width,
        "intermediate_size": required(config, "intermediate_size"),
        "num_hidden_layers": required(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim(config),
        "hidden_act": config.get("hidden_act") or "silu",
        "rms_norm_eps": config.get("rms_norm_eps"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": rope_theta(config),
        "rope_scaling": rope_scaling(config),
        "rotary_dim": int(head_dim(config) * partial_rotary_factor(config)),
        "sliding_window": [None] * int(required(config, "num_hidden_layers")),
        "query_pre_attn_scalar": head_dim(config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query, key and value bias": attention_bias,
        "attention output bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "embedding scale": 1.0,
        "norm weight is an offset from 1": False,
        "feed-forward norms": "before",
    }


def _rope(config: HFConfig) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}
