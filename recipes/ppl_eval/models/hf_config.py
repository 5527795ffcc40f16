"""Reading Hugging Face's config.json: one meaning for its old and new spellings.

Both spellings of RoPE occur: ``rope_theta`` with ``rope_scaling`` before transformers 5, ``rope_parameters``
since. A file that states one fact twice, differently, is refused: versions of transformers do not agree on
which of the two they take. The functions expect the file with the keys that it omits filled in: those have
the defaults of transformers for that ``model_type``, which are in the table of ``families``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HFConfig = Mapping[str, Any]
# Of configs that were made from another file: its name, and the keys that it says nothing about.
SOURCE, UNSTATED = "_source", "_unstated"
# Keys for which transformers' config classes refuse null: any value read for it would be a guess.
_NEVER_NULL = (
    *("rope_theta", "partial_rotary_factor", "hidden_act", "rms_norm_eps"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias"),
)


def source(config: HFConfig) -> str:
    """Return the name of the file that the hyperparameters come from."""
    return str(config.get(SOURCE, "config.json"))


def required(config: HFConfig, key: str) -> Any:
    """Return the value of a key that no default can stand in for.

    Raises:
        ValueError: if config.json lacks it.
    """
    value = config.get(key)
    if value is None:
        raise ValueError(f"{source(config)} has no {key!r}; is it the file that belongs to the checkpoint?")
    return value


def head_dim(config: HFConfig) -> int:
    """Return the size of an attention head."""
    return config.get("head_dim") or required(config, "hidden_size") // required(
        config, "num_attention_heads"
    )


def check_nulls(config: HFConfig, keys: Iterable[str] = ()) -> None:
    """Refuse null for a key that transformers does not accept it for.

    Args:
        config: the file, without defaults.
        keys: keys that this ``model_type`` alone never has as null.

    Raises:
        ValueError: naming the keys.
    """
    found = [key for key in dict.fromkeys((*_NEVER_NULL, *keys)) if key in config and config[key] is None]
    if found:
        raise ValueError(
            f"config.json has null for {', '.join(found)}, which transformers does not load: write the"
            " model's value, or remove the key for transformers' default"
        )


def rope_theta(config: HFConfig) -> float:
    """Return the RoPE base."""
    return float(_rope_fact(config, "rope_theta") or 10_000.0)


def partial_rotary_factor(config: HFConfig) -> float:
    """Return the rotated share of a head."""
    return float(_rope_fact(config, "partial_rotary_factor") or 1.0)


def rope_scaling(config: HFConfig, aliases: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return RoPE scaling in one spelling: ``rope_type`` and, for llama3 and longrope, all its parameters.

    A llama3 or linear scaling by 1 is "default". Types that torchtune cannot express keep their parameters as
    they are.

    Args:
        config: the file.
        aliases: names under which transformers reads another type for this ``model_type``.
    """
    rope = _rope(config)
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    kinds = {key: (aliases or {}).get(kind, kind) for key, kind in kinds.items()}
    kind = _one_value(kinds) or "default"
    if kind == "default" or (kind in ("llama3", "linear") and float(required(rope, "factor")) == 1.0):
        return {"rope_type": "default"}
    if kind not in ("llama3", "longrope"):
        rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type", "rope_type")}
        return {"rope_type": kind, **rest}
    # Phi-3 keeps the original length beside rope_scaling, Llama 3 inside it.
    original = _rope_fact(config, "original_max_position_embeddings")
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

    The other architectures differ from these facts in a few keys: see ``architectures.Architecture``.
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
        "attention norms": "before",
        "feed-forward norms": "before",
        "query and key norms": None,
        "layers without positions": [],
        "rope_local_base_freq": None,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def _rope(config: HFConfig) -> Mapping[str, Any]:
    spellings = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    for key, rope in spellings.items():
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError(
                f"{key} in config.json is {rope}: only one set of RoPE parameters for all layers can be built"
            )
    facts = [_plain_rope(config, rope) for rope in spellings.values()]
    if len(facts) == 2 and facts[0] != facts[1]:
        raise ValueError(
            f"config.json states RoPE twice, differently: rope_parameters {config['rope_parameters']} and"
            f" rope_scaling {config['rope_scaling']}; remove the one that the model was not trained with"
        )
    return next(iter(spellings.values()), {})


def _plain_rope(config: HFConfig, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters such that two spellings of the same are equal."""
    plain = {key: value for key, value in rope.items() if value is not None and key != "type"}
    plain["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if plain.get(key) is None and config.get(key) is not None:
            plain[key] = config[key]
    return plain


def _rope_fact(config: HFConfig, key: str) -> Any:
    """Return a value that stands in the RoPE parameters, beside them, or both; None if in neither."""
    places = {
        f"{key} inside the RoPE parameters": _rope(config).get(key),
        f"{key} beside them": config.get(key),
    }
    return _one_value({place: value for place, value in places.items() if value is not None})


def _one_value(spellings: Mapping[str, Any]) -> Any:
    values = list(spellings.values())
    if any(value != values[0] for value in values):
        listed = " and ".join(f"{key} {value!r}" for key, value in spellings.items())
        raise ValueError(
            f"config.json states one fact twice, differently: {listed} (transformers' default where the file"
            " lacks it); leave the one that the model was trained with, or write it in both places"
        )
    return values[0] if values else None
