"""Meta's params.json beside a .pth, as config.json would have it, so that the model is checked against it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_eval.config.files import read_json_object
from ppl_eval.models import config_check, families
from ppl_eval.models.hf_config import SOURCE, UNSTATED, HFConfig

NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    # Mistral's own files have these.
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "sliding_window": "sliding_window",
}
SCALING = ("use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor")
# Lengths and batches of Meta's own generation, and what the feed-forward width is computed from.
OTHER_KEYS = {*SCALING, "multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"}
# (width, layers) of the released models that have the scaling, and its factor, which their files leave out.
RELEASED_FACTORS = {(4096, 32): 8.0, (8192, 80): 8.0, (16384, 126): 8.0, (2048, 16): 32.0, (3072, 28): 32.0}


def meta_config(
    folder: Path, *, model_type: str, vocab_size: int | None, beside: HFConfig | None, notes: list[str]
) -> HFConfig | None:
    """Return what params.json says, under the keys of config.json; config.json where there is none.

    Args:
        folder: of the weights.
        model_type: the checkpointer's.
        vocab_size: rows of the embedding: Llama 2's files have -1 for it.
        beside: config.json of the same folder, or None; it must not contradict the file.
        notes: what the person should know is appended here.

    Raises:
        ValueError: for a damaged file, keys that are not known here, a scaling of RoPE without its factor,
            or a config.json that says something else.
    """
    path = folder / "params.json"
    if not path.is_file():
        return beside
    params = read_json_object(path)
    unknown = {key: params[key] for key in params if key not in NAMES and key not in OTHER_KEYS}
    if unknown:
        raise ValueError(f"{path} has {unknown}, which may change the arithmetic and is not known here")
    config = {hf: params[key] for key, hf in NAMES.items() if params.get(key) is not None}
    if config.get("vocab_size", -1) == -1:
        config["vocab_size"] = vocab_size
    for key in ("dim", "n_layers", "n_heads"):
        if not isinstance(params.get(key), int):
            raise ValueError(f"{path} has no {key}; is it the file that belongs to the checkpoint?")
    config.setdefault("num_key_value_heads", params["n_heads"])
    # The defaults of Meta's ModelArgs.
    config.setdefault("rms_norm_eps", 1e-5)
    config.setdefault("intermediate_size", _feed_forward_width(params))
    config.setdefault("sliding_window", None)
    config["rope_scaling"] = _rope_scaling(path, params)
    config["model_type"] = families.family_of_model_type(model_type).architecture.model_type
    # Meta's files repeat the embedding of a tied model as its head: loading compares the two.
    config |= {SOURCE: path.name, UNSTATED: ["tie_word_embeddings"]}
    return config_check.completed(config, beside, notes) if beside else config


def _feed_forward_width(params: Mapping[str, Any]) -> int:
    """Compute the width as Meta's FeedForward does."""
    width = int(2 * 4 * params["dim"] / 3)
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    multiple = params.get("multiple_of") or 256
    return multiple * math.ceil(width / multiple)


def _rope_scaling(path: Path, params: Mapping[str, Any]) -> dict[str, Any] | None:
    if not params.get("use_scaled_rope"):
        return None
    factor = params.get("rope_scaling_factor") or RELEASED_FACTORS.get((params["dim"], params["n_layers"]))
    if factor is None:
        raise ValueError(
            f"{path} has use_scaled_rope and does not say by how much: add rope_scaling_factor, 8 for Llama"
            " 3.1 and 3.3, 32 for Llama 3.2"
        )
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(params.get("rope_high_freq_factor") or 4.0),
        "original_max_position_embeddings": 8192,
    }
