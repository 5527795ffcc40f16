"""Reading a built torchtune model: every constant of its arithmetic, as its modules will use it.

The builder's arguments are not read: a builder may ignore one, and a correction may have changed one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear

from ppl_eval.models import attention
from ppl_eval.models.building import ScaledEmbedding
from ppl_eval.models.corrections import Phi3RoPE
from ppl_eval.models.gemma3 import LinearRoPE


def facts(model: TransformerDecoder) -> dict[str, Any]:
    """Return what the built model uses, read from its modules, by the keys of config.json."""
    layers = list(model.layers)
    embedding = model.tok_embeddings
    vocab_size, width = embedding.weight.shape
    softcap, final_softcap, scale = (
        _uniform(layers, _attention_constants),
        _final_softcap(model),
        _uniform(layers, _scale),
    )
    positions = [layer.attn.pos_embeddings for layer in layers if layer.attn.pos_embeddings is not None]
    ropes = [rope for rope in positions if not _is_local(rope)]
    local_ropes = [rope for rope in positions if _is_local(rope)]
    norms = [norm for norm in model.modules() if hasattr(norm, "eps")]
    return {
        "vocab_size": vocab_size
        if _head_rows(model) == vocab_size
        else f"{vocab_size} rows of embeddings, {_head_rows(model)} of the head",
        "hidden_size": width,
        "intermediate_size": _uniform(layers, lambda layer: layer.mlp.w1.weight.shape[0]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": _uniform(layers, lambda layer: layer.attn.num_heads),
        "num_key_value_heads": _uniform(layers, lambda layer: layer.attn.num_kv_heads),
        "head_dim": _uniform(layers, lambda layer: layer.attn.head_dim),
        "hidden_act": _uniform(layers, lambda layer: _activation(layer.mlp.activation)),
        "rms_norm_eps": _uniform(norms, lambda norm: norm.eps),
        "tie_word_embeddings": _is_tied(model),
        "rope_theta": _uniform(ropes, lambda rope: float(rope.base)),
        "rope_scaling": _uniform(ropes, _scaling),
        "rotary_dim": _uniform(ropes + local_ropes, lambda rope: getattr(rope, "rotary_dim", rope.dim)),
        "sliding_window": [_window(layer) for layer in layers],
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": softcap,
        "final_logit_softcapping": final_softcap,
        "query, key and value bias": _uniform(
            layers, lambda layer: _has_bias(layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj)
        ),
        "attention output bias": _uniform(layers, lambda layer: _has_bias(layer.attn.output_proj)),
        "mlp_bias": _uniform(layers, lambda layer: _has_bias(layer.mlp.w1, layer.mlp.w2, layer.mlp.w3)),
        "embedding scale": _embedding_scale(embedding),
        "norm weight is an offset from 1": _uniform(norms, lambda norm: isinstance(norm, GemmaRMSNorm)),
        "attention norms": _uniform(layers, lambda layer: _places(layer.sa_norm, layer.sa_scale)),
        "feed-forward norms": _uniform(layers, _feed_forward_norms),
        "query and key norms": _uniform(layers, _query_norms),
        "layers without positions": [
            index for index, layer in enumerate(layers) if layer.attn.pos_embeddings is None
        ],
        "rope_local_base_freq": _local_base(layers),
        "residual_multiplier": _uniform(
            [scale for layer in layers for scale in (layer.sa_scale, layer.mlp_scale)],
            lambda scale: getattr(scale, "factor", 1.0),
        ),
        "logits_scaling": getattr(model, "logits_scaling", 1.0),
    }


def _embedding_scale(embedding: nn.Embedding) -> float:
    if isinstance(embedding, GemmaNormEmbeddings):
        return math.sqrt(embedding.embedding_dim)
    return embedding.scale if isinstance(embedding, ScaledEmbedding) else 1.0


def _is_local(rope: Any) -> bool:
    return getattr(rope, "is_local", False)


def _local_base(layers: Sequence[Any]) -> Any:
    """Return the base of the layers with a window where they have one of their own, else None; a list of
    layers where it is not just those."""
    local = [index for index, layer in enumerate(layers) if _is_local(layer.attn.pos_embeddings)]
    if local and local != [index for index, layer in enumerate(layers) if _window(layer)]:
        return f"one of its own in layers {local}"
    return _uniform([layers[index].attn.pos_embeddings for index in local], lambda rope: float(rope.base))


def _places(before: nn.Module, after: nn.Module) -> str:
    found = [name for name, part in (("before", before), ("after", after)) if hasattr(part, "eps")]
    return " and ".join(found)


def _query_norms(layer: Any) -> str | None:
    attn = layer.attn
    if getattr(attn, "q_norm", None) is None:
        return None
    if not isinstance(attn, attention.NormedAttention):
        return "after rotary positions"
    return "over all heads" if attn.whole_width else "of each head"


def _uniform(items: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """Return the one value that all items share, or a list of all values where they differ."""
    values = [read(item) for item in items]
    if not values:
        return None
    return values[0] if all(value == values[0] for value in values) else values


def _head_rows(model: TransformerDecoder) -> int:
    head = model.output
    return (head.tied_module if isinstance(head, TiedLinear) else head).weight.shape[0]


def _is_tied(model: TransformerDecoder) -> bool:
    return isinstance(model.output, TiedLinear) or model.output.weight is model.tok_embeddings.weight


def _activation(module: nn.Module) -> str:
    if isinstance(module, nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    return type(module).__name__.lower()


def _has_bias(*modules: nn.Module) -> bool | list[bool]:
    return _uniform(modules, lambda module: getattr(module, "bias", None) is not None)


def _scaling(rope: Any) -> dict[str, Any]:
    if isinstance(rope, Phi3RoPE) and rope.long_factor is not None:
        return {
            "rope_type": "longrope",
            "short_factor": rope.short_factor,
            "long_factor": rope.long_factor,
            "original_max_position_embeddings": rope.original_max_seq_len,
            "attention_factor": rope.attention_factor,
        }
    if isinstance(rope, Llama3ScaledRoPE) and rope.scale_factor != 1:
        return {
            "rope_type": "llama3",
            "factor": float(rope.scale_factor),
            "low_freq_factor": float(rope.low_freq_factor),
            "high_freq_factor": float(rope.high_freq_factor),
            "original_max_position_embeddings": rope.old_context_len,
        }
    if isinstance(rope, LinearRoPE) and rope.factor != 1:
        return {"rope_type": "linear", "factor": float(rope.factor)}
    return {"rope_type": "default"}


def _window(layer: Any) -> int | None:
    return (
        layer.attn.sliding_window_size
        if isinstance(layer.attn, Gemma2Attention)
        else attention.installed(layer.attn)["window"]
    )


def _attention_constants(layer: Any) -> float | None:
    return (
        layer.attn.softcapping
        if isinstance(layer.attn, Gemma2Attention)
        else attention.installed(layer.attn)["softcap"]
    )


def _scale(layer: Any) -> float:
    """Return the number whose inverse square root multiplies the attention scores."""
    scale = (
        layer.attn.scaling
        if isinstance(layer.attn, Gemma2Attention)
        else attention.installed(layer.attn)["scale"]
    )
    return layer.attn.head_dim if scale is None else scale**-2


def _final_softcap(model: TransformerDecoder) -> float | str | None:
    if isinstance(model.norm, Gemma2FinalNorm) and not isinstance(model.norm.logit_capping, nn.Identity):
        return f"{model.norm.capping_value:g}, on the hidden state"
    return getattr(model, "final_logit_softcap", None)


def _feed_forward_norms(layer: Any) -> str:
    places = _places(layer.mlp_norm, layer.mlp_scale)
    # torchtune's converter exchanges their names, which its layer does not know of.
    uncorrected = isinstance(layer.attn, Gemma2Attention)
    return f"{places}, exchanged" if uncorrected else places
