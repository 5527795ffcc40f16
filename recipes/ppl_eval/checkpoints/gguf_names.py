"""llama.cpp's names and rows of every architecture, turned into Hugging Face's.

llama.cpp's converter renames every tensor, puts the rows of Llama's query and key projections in the order of
rotary pairs, and adds 1 to Gemma's norms. Here that is undone, so that what follows is the same as for the
files of Hugging Face.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ppl_eval.models.hf_config import required

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


@dataclass(frozen=True)
class Form:
    """How llama.cpp stores the models of one architecture.

    Attributes:
        names: what it calls the parts of a layer, where that is not what it is for Llama.
        keys: metadata beside that of every architecture, and its name in config.json.
        rotary_pairs: query and key rows have the halves of a rotary pair side by side.
        norms_plus_one: norms are stored with 1 added.
        facts: what follows from the metadata without being in it, by llama.cpp's own rules.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    rotary_pairs: bool = False
    norms_plus_one: bool = False
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}


def _attention_scale(layers_of_27b: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return llama.cpp's rule for Gemma 2 and 3, which knows the largest model by its number of layers."""

    def facts(config: Mapping[str, Any]) -> dict[str, Any]:
        width, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
        largest = required(config, "num_hidden_layers") == layers_of_27b
        return {
            "query_pre_attn_scalar": width // heads if largest else config.get("head_dim", width // heads)
        }

    return facts


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
FORMS = {
    "llama": Form(rotary_pairs=True),
    "qwen2": Form(),
    "qwen3": Form(names=_HEAD_NORMS),
    "phi3": Form(names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gemma": Form(norms_plus_one=True),
    "gemma2": Form(names=_FOUR_NORMS, keys=_CAPS, norms_plus_one=True, facts=_attention_scale(46)),
}


def hf_name(form: Form, name: str) -> str:
    """Return Hugging Face's name; an unknown tensor keeps its own, and is reported as unexpected."""
    found = _NAME.fullmatch(name)
    part = found and (form.names.get(found[2]) or _LAYER.get(found[2]))
    if not (found and part):
        return _WHOLE.get(name, name)
    return f"model.layers.{found[1]}.{part}.{found[3]}"


def undo(form: Form, name: str, config: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what turns a stored tensor into Hugging Face's, or None where nothing has to be done.

    Args:
        form: of the architecture.
        name: llama.cpp's name of the tensor.
        config: the model's sizes, under the keys of config.json.
    """
    rotated = _ROTATED.fullmatch(name) if form.rotary_pairs else None
    if rotated:
        heads = required(config, "num_attention_heads" if rotated[1] == "q" else "num_key_value_heads")
        return lambda tensor: _halves(tensor, heads)
    if form.norms_plus_one and name.endswith("norm.weight"):
        return lambda tensor: tensor - 1
    return None


def _halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the two halves of each rotary pair half a head apart, as Hugging Face has them."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
