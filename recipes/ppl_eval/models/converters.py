"""From Hugging Face's weight names and row order to torchtune's, with torchtune's own functions.

Every converter works key by key, so it can be called with one tensor at a time, tensors on the meta device
included.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torchtune.models import convert_weights
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune


@dataclass(frozen=True)
class HeadLayout:
    """What decides how the rows of the attention's projections are ordered.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        hidden_size: width of the model.
        columns: columns of the matrices to convert; ``hidden_size``, but for the factors of a LoRA update.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    columns: int


Tensors = dict[str, Tensor]


class HFConverter(Protocol):
    """From tensors under Hugging Face's names to those that a builder's model has."""

    def __call__(self, tensors: Tensors, layout: HeadLayout) -> Tensors:
        """Convert some or all tensors of a checkpoint."""


def head_layout(hf_config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> HeadLayout:
    """Read the layout from a checkpoint's config.json.

    Args:
        hf_config: its content.
        defaults: what transformers assumes where it lacks a key, for this ``model_type``.

    Raises:
        ValueError: if there is no config.json, or it lacks a size.
    """
    if hf_config is None:
        raise ValueError(
            "the HF form needs config.json beside the weights (head counts decide how they are laid out)"
        )
    hf_config = {**defaults, **hf_config}
    try:
        num_heads, hidden_size = hf_config["num_attention_heads"], hf_config["hidden_size"]
    except KeyError as e:
        raise ValueError(
            f"config.json lacks {e.args[0]}: not the config of a text decoder that torchtune knows"
        ) from e
    return HeadLayout(
        num_heads=num_heads,
        # Configs from before grouped queries lack it.
        num_kv_heads=hf_config.get("num_key_value_heads") or num_heads,
        head_dim=hf_config.get("head_dim") or hidden_size // num_heads,
        hidden_size=hidden_size,
        columns=hidden_size,
    )


def llama(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Convert weights of the llama kind: Llama, Mistral, Gemma."""
    return convert_weights.hf_to_tune(tensors, **_rotary_pairs(layout))


def gemma2(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Convert weights of Gemma 2, which has four norms a layer."""
    return gemma2_hf_to_tune(tensors, **_rotary_pairs(layout))


def qwen2(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Convert weights of Qwen 2, whose rows stay in their order.

    The head of a tied model is kept: loading compares it with the embedding.
    """
    return qwen2_hf_to_tune(tensors, tie_word_embeddings=False)


def phi3(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Split the fused projections of Phi-3 and Phi-4."""
    heads: dict[str, int | None] = {"num_heads": None, "num_kv_heads": None, "dim": None}  # three equal parts
    if layout.num_heads != layout.num_kv_heads:
        heads = {
            "num_heads": layout.num_heads,
            "num_kv_heads": layout.num_kv_heads,
            "dim": layout.hidden_size,
        }
    return phi3_hf_to_tune(tensors, **heads)


_WHOLE = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "self_attn.q_proj.weight": "attn.q_proj.weight",
    "self_attn.k_proj.weight": "attn.k_proj.weight",
    "self_attn.v_proj.weight": "attn.v_proj.weight",
    "self_attn.o_proj.weight": "attn.output_proj.weight",
    "self_attn.q_norm.weight": "attn.q_norm.scale",
    "self_attn.k_norm.weight": "attn.k_norm.scale",
    "mlp.gate_proj.weight": "mlp.w1.weight",
    "mlp.down_proj.weight": "mlp.w2.weight",
    "mlp.up_proj.weight": "mlp.w3.weight",
    "input_layernorm.weight": "sa_norm.scale",
}
_TWO_NORMS = {**_LAYER, "post_attention_layernorm.weight": "mlp_norm.scale"}
_MORE_NORMS = {
    **_LAYER,
    "post_attention_layernorm.weight": "sa_scale.scale",
    "pre_feedforward_layernorm.weight": "mlp_norm.scale",
    "post_feedforward_layernorm.weight": "mlp_scale.scale",
}
_IN_LAYER = re.compile(r"model\.(layers\.\d+)\.(.+)")


def qwen3(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Rename the weights of Qwen 3, whose rows stay in their order."""
    return _renamed(tensors, _TWO_NORMS)


def norms_after(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Rename the weights of models with norms after attention and MLP too: OLMo 2 and Gemma 3."""
    return _renamed(tensors, _MORE_NORMS)


def _renamed(tensors: Tensors, layer_names: Mapping[str, str]) -> Tensors:
    # Unknown names stay, for the comparison with the model to report.
    renamed = {}
    for name, tensor in tensors.items():
        found = _IN_LAYER.fullmatch(name)
        known = layer_names.get(found[2]) if found else None
        renamed[f"{found[1]}.{known}" if found and known else _WHOLE.get(name, name)] = tensor
    return renamed


def _rotary_pairs(layout: HeadLayout) -> dict[str, int]:
    # What torchtune needs to put the two halves of each rotary pair side by side.
    return {
        "num_heads": layout.num_heads,
        "num_kv_heads": layout.num_kv_heads,
        "dim": layout.columns,
        "head_dim": layout.head_dim,
    }
