"""The parts of this project's own decoders, which are torchtune's as far as torchtune has them.

A family is a module beside this one with one builder, whose arguments are the constants in which its
checkpoints differ. What it builds is a torchtune ``TransformerDecoder``, so that sharding, compilation and
the kernels for CPUs know it already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.tied_linear import TiedLinear

from ppl_eval.models import attention

# (width, eps) -> norm
Norm = Callable[[int, float], nn.Module]


@dataclass(frozen=True)
class Sizes:
    """What every decoder has; the names are those of torchtune's builders."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int
    head_dim: int
    max_seq_len: int
    norm_eps: float


class ScaledEmbedding(nn.Embedding):
    """An embedding times a constant, which is rounded to the weight's dtype first, as transformers does.

    Args:
        num_embeddings: tokens.
        embedding_dim: width.
        scale: the constant.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Look up tokens; [B, T] to [B, T, D]."""
        out = super().forward(input)
        return out * torch.tensor(self.scale, dtype=out.dtype, device=out.device)


class Factor(nn.Module):
    """Multiplies by a constant: what a layer adds to the residual stream (Granite).

    Args:
        factor: the constant.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Multiply; any shape."""
        return x * self.factor


def attend_part(
    sizes: Sizes,
    rope: nn.Module | None,
    *,
    norm: Norm | None = None,
    whole_width: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> MultiHeadAttention:
    """Return the attention of one layer.

    Args:
        sizes: of the model.
        rope: turns queries and keys by their positions; None for a layer without positions.
        norm: of queries and keys; None for none.
        whole_width: see ``attention.NormedAttention``.
        window: keys that a query sees, itself included; None for all.
        scale: factor on the scores; None for head_dim ** -0.5.
    """
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    parts: dict[str, Any] = {
        "embed_dim": sizes.embed_dim,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "q_proj": nn.Linear(sizes.embed_dim, queries, bias=False),
        "k_proj": nn.Linear(sizes.embed_dim, keys, bias=False),
        "v_proj": nn.Linear(sizes.embed_dim, keys, bias=False),
        "output_proj": nn.Linear(queries, sizes.embed_dim, bias=False),
        "pos_embeddings": rope,
        "max_seq_len": sizes.max_seq_len,
    }
    if norm is None:
        attn = MultiHeadAttention(**parts)
    else:
        widths = (queries, keys) if whole_width else (sizes.head_dim, sizes.head_dim)
        q_norm, k_norm = (norm(width, sizes.norm_eps) for width in widths)
        attn = attention.NormedAttention(**parts, q_norm=q_norm, k_norm=k_norm, whole_width=whole_width)
    if window is not None or scale is not None:
        attention.install(attn, window=window, scale=scale)
    return attn


def feed_forward(sizes: Sizes, activation: nn.Module | None = None) -> FeedForward:
    """Return the gated MLP of one layer; SiLU unless told otherwise."""
    return FeedForward(
        gate_proj=nn.Linear(sizes.embed_dim, sizes.intermediate_dim, bias=False),
        down_proj=nn.Linear(sizes.intermediate_dim, sizes.embed_dim, bias=False),
        up_proj=nn.Linear(sizes.embed_dim, sizes.intermediate_dim, bias=False),
        activation=nn.SiLU() if activation is None else activation,
    )


def pre_norm_layer(
    sizes: Sizes, attn: MultiHeadAttention, residual_multiplier: float = 1.0
) -> TransformerSelfAttentionLayer:
    """Return a layer as Llama has it: norms before attention and MLP.

    Args:
        sizes: of the model.
        attn: its attention.
        residual_multiplier: factor on what attention and MLP add.
    """
    scales = {}
    if residual_multiplier != 1.0:
        scales = {part: Factor(residual_multiplier) for part in ("sa_scale", "mlp_scale")}
    return TransformerSelfAttentionLayer(
        attn=attn,
        mlp=feed_forward(sizes),
        sa_norm=RMSNorm(sizes.embed_dim, eps=sizes.norm_eps),
        mlp_norm=RMSNorm(sizes.embed_dim, eps=sizes.norm_eps),
        **scales,
    )


def decoder(
    sizes: Sizes,
    layer: Callable[[int], TransformerSelfAttentionLayer],
    *,
    tied: bool,
    norm: Norm = RMSNorm,
    embedding_scale: float = 1.0,
) -> TransformerDecoder:
    """Return a decoder of layers that are made by their index.

    Args:
        sizes: of the model.
        layer: returns the layer of an index.
        tied: whether the head is the embedding.
        norm: the last one.
        embedding_scale: factor on embeddings.
    """
    embedding = (
        nn.Embedding(sizes.vocab_size, sizes.embed_dim)
        if embedding_scale == 1.0
        else ScaledEmbedding(sizes.vocab_size, sizes.embed_dim, scale=embedding_scale)
    )
    head = TiedLinear(embedding) if tied else nn.Linear(sizes.embed_dim, sizes.vocab_size, bias=False)
    return TransformerDecoder(
        tok_embeddings=embedding,
        layers=nn.ModuleList(layer(index) for index in range(sizes.num_layers)),
        max_seq_len=sizes.max_seq_len,
        num_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        norm=norm(sizes.embed_dim, sizes.norm_eps),
        output=head,
    )
