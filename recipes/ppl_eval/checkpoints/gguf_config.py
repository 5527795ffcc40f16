"""The hyperparameters of a GGUF file, as config.json would have them.

A key whose meaning is not known here is refused: it may change the arithmetic.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoints.gguf_names import Form
from ppl_eval.models.hf_config import SOURCE

NAMES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
# Read by name below, checked by their tensors, or of no effect on the numbers.
OTHER_KEYS = {
    *("rope.dimension_count", "attention.value_length", "attention.causal", "rope.scale_linear"),
    *("expert_count", "expert_used_count", "tensor_data_layout"),
}
SCALING = "rope.scaling."
# Llama 3.1's frequency factors as a tensor; torchtune's builder computes the same ones from scale_factor.
ROTARY_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# The constants that torchtune's Llama 3 builders have in them; the factor is their argument.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(
    path: Path,
    fields: Mapping[str, Any],
    form: Form,
    *,
    model_type: str,
    vocab_size: int | None,
    rope_factors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return what a file says, under the keys of config.json.

    Args:
        path: the file, for messages.
        fields: its metadata.
        form: how llama.cpp stores the architecture.
        model_type: ``model_type`` of the config.json that the weights had.
        vocab_size: rows of the embedding, for files without the key.
        rope_factors: the tensors by which rotary frequencies are divided, by name.

    Raises:
        ValueError: for keys that are not known here, or RoPE factors that no builder computes.
    """
    prefix = f"{fields['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    names = {**NAMES, **form.keys}
    unknown = [key for key in own if key not in names and key not in OTHER_KEYS and SCALING not in key]
    unknown += [key for key in own if isinstance(own[key], list)]  # a value for each layer
    unknown += [key for key in ("attention.causal",) if own.get(key, True) is not True]
    if unknown:
        listed = ", ".join(f"{prefix}{key}={own[key]}" for key in unknown)
        raise ValueError(
            f"{path} has {listed}, which may change the arithmetic and is not read: score the model's"
            " Hugging Face form"
        )
    config: dict[str, Any] = {hf: own[key] for key, hf in names.items() if key in own}
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = _decimal(config["rms_norm_eps"])
    config.setdefault("vocab_size", vocab_size)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config["sliding_window"] = config.get("sliding_window") or None
    if "rope.dimension_count" in own and "num_attention_heads" in config:
        head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config["partial_rotary_factor"] = own["rope.dimension_count"] / head_dim
    config |= {"model_type": model_type, SOURCE: path.name}
    long_short = [rope_factors.get(name) for name in LONGROPE_FACTORS]
    if any(factors is not None for factors in long_short):
        config |= _longrope(path, own, config, long_short)
    else:
        config["rope_scaling"] = _rope_scaling(path, own, config, rope_factors.get(ROTARY_FACTORS))
    return config | form.facts(config)


def _decimal(value: float) -> float:
    """Return the decimal number that a float32 of the file stands for: 9.99999975e-06 is 1e-05."""
    return float(f"{value:.6g}")


def _longrope(
    path: Path, own: Mapping[str, Any], config: Mapping[str, Any], factors: list[torch.Tensor | None]
) -> dict[str, Any]:
    """Return Phi-3's LongRoPE, whose attention is scaled by 1 where the file does not say otherwise."""
    if config["model_type"] != "phi3":
        raise ValueError(
            f"{path} scales RoPE by LongRoPE, which no builder of its architecture computes: score the model"
            " with transformers or llama.cpp"
        )
    original, length = own.get(f"{SCALING}original_context_length"), config.get("max_position_embeddings")
    if any(each is None for each in factors) or not original or not length:
        raise ValueError(
            f"{path} needs {' and '.join(LONGROPE_FACTORS)} and both context lengths for LongRoPE"
        )
    attention = own.get(f"{SCALING}attn_factor", 1.0)
    formula = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    long, short = (_decimals(each) for each in factors if each is not None)
    scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if not math.isclose(attention, formula, rel_tol=1e-6):
        scaling["attention_factor"] = attention
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _decimals(values: torch.Tensor) -> list[float]:
    """Return the shortest decimal numbers that these float32 stand for."""
    return [float(str(value)) for value in values.float().flatten().numpy()]


def _rope_scaling(
    path: Path, own: Mapping[str, Any], config: Mapping[str, Any], factors: torch.Tensor | None
) -> dict[str, Any] | None:
    scaling = {key.removeprefix(SCALING): own[key] for key in own if key.startswith(SCALING)}
    # As llama.cpp reads it: a factor without a type is linear, 0 is none, and scale_linear is its old name.
    kind = scaling.get("type", "linear")
    factor = _decimal(scaling.get("factor", own.get("rope.scale_linear", 0.0)) or 1.0)
    stated = kind not in ("none", "linear") or (kind == "linear" and factor != 1.0)
    stated = stated or _decimal(scaling.get("attn_factor", 1.0)) != 1.0
    from_factors = None if factors is None else llama3_scaling(path, factors, config)
    if from_factors and stated:
        raise ValueError(
            f"{path} scales RoPE twice: by rope_freqs.weight and by {SCALING}* {scaling}; no builder computes"
            " both: score the model's Hugging Face form"
        )
    if not stated:
        return from_factors
    if kind == "longrope":
        raise ValueError(f"{path} says that RoPE is scaled by LongRoPE, and lacks its factors")
    rest = {key: value for key, value in scaling.items() if key not in ("type", "factor", "finetuned")}
    original = rest.pop("original_context_length", None)
    rest |= {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": factor, **rest}


def llama3_scaling(path: Path, factors: torch.Tensor, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Llama 3's scaling whose formula gives the factors, or None where all of them are 1.

    The formula (``_compute_llama3_parameters`` in transformers) divides a frequency of wavelength w by the
    factor F where w exceeds 8192 / 1, by 1 where it is below 8192 / 4, and between them by
    1 / ((1 - s) / F + s) with s = (8192 / w - 1) / (4 - 1).

    Raises:
        ValueError: if the factors are none of these.
    """
    found = factors.double().flatten().tolist()
    if all(value == 1.0 for value in found):
        return None
    base, num = config.get("rope_theta", 10_000.0), len(found)
    smooth = [_smooth(2 * math.pi * base ** (i / num)) for i in range(num)]
    # The last one is the most scaled; if its wavelength lies between the bounds, the formula is inverted.
    share, last = smooth[-1], found[-1]
    inverse = (1 / last - share) / (1 - share) if last and share < 1 else 0.0
    factor = _decimal(1 / inverse) if inverse > 0 else 1.0
    expected = [1 / ((1 - s) / factor + s) for s in smooth]
    if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, expected, strict=True)):
        raise ValueError(
            f"{path} scales RoPE by rope_freqs.weight, whose factors {found[0]:g} to {last:g} are not those"
            f" of Llama 3's formula with {LLAMA3} and rope_theta {base:g}, the only ones that a builder of"
            " torchtune 0.6.1 computes: score the model with transformers or llama.cpp"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _smooth(wavelength: float) -> float:
    low, high, original = LLAMA3.values()
    return min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
