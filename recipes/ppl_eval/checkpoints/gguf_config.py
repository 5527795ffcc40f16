"""The hyperparameters of a GGUF file of the llama architecture, as config.json would have them.

A key whose meaning is not known here is refused: it may change the arithmetic.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ppl_eval.models.hf_config import SOURCE

ARCHITECTURE = "llama"
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
# The constants that torchtune's Llama 3 builders have in them; the factor is their argument.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(
    path: Path,
    fields: Mapping[str, Any],
    *,
    model_type: str,
    vocab_size: int | None,
    rope_factors: torch.Tensor | None,
) -> dict[str, Any]:
    """Return what a file says, under the keys of config.json.

    Args:
        path: the file, for messages.
        fields: its metadata.
        model_type: ``model_type`` of the config.json that the weights had.
        vocab_size: rows of the embedding, for files without the key.
        rope_factors: ``rope_freqs.weight``, by which each rotary frequency is divided.

    Raises:
        ValueError: for keys that are not known here, or RoPE factors that are not Llama 3's.
    """
    prefix = f"{ARCHITECTURE}."
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    unknown = [key for key in own if key not in NAMES and key not in OTHER_KEYS and SCALING not in key]
    unknown += [key for key in own if isinstance(own[key], list)]  # a value for each layer
    unknown += [key for key in ("attention.causal",) if own.get(key, True) is not True]
    if unknown:
        listed = ", ".join(f"{prefix}{key}={own[key]}" for key in unknown)
        raise ValueError(
            f"{path} has {listed}, which may change the arithmetic and is not read: score the model's"
            " Hugging Face form"
        )
    config: dict[str, Any] = {hf: own[key] for key, hf in NAMES.items() if key in own}
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = _decimal(config["rms_norm_eps"])
    config.setdefault("vocab_size", vocab_size)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config["sliding_window"] = config.get("sliding_window") or None
    if "rope.dimension_count" in own and "num_attention_heads" in config:
        head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config["partial_rotary_factor"] = own["rope.dimension_count"] / head_dim
    config |= {"model_type": model_type, SOURCE: path.name}
    config["rope_scaling"] = _rope_scaling(path, own, config, rope_factors)
    return config


def _decimal(value: float) -> float:
    """Return the decimal number that a float32 of the file stands for: 9.99999975e-06 is 1e-05."""
    return float(f"{value:.6g}")


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
        raise ValueError(
            f"{path} scales RoPE by LongRoPE, which no llama builder of torchtune 0.6.1 computes: score the"
            " model with transformers or llama.cpp"
        )
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
