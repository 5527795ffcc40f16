"""Gemma 3, the text decoder: five layers with a window and a RoPE base of their own to one that sees all.

Norms before and after attention and MLP, norms on the queries and keys of each head, embeddings times the
root of the width, no caps.
Source: arXiv:2503.19786, section 2, and transformers' ``modeling_gemma3.py``.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from ppl_eval.models.building import Sizes, attend_part, decoder, feed_forward


class LinearRoPE(Qwen2RotaryPositionalEmbeddings):
    """Rotary positions divided by a factor; 1 for none.

    Args:
        dim: head size.
        max_seq_len: positions of the table.
        base: RoPE base.
        factor: what positions are divided by.
        is_local: whether it is that of the layers with a window.
    """

    theta: Tensor

    def __init__(
        self, dim: int, max_seq_len: int, base: float, *, factor: float = 1.0, is_local: bool = False
    ) -> None:
        self.factor, self.is_local = factor, is_local
        super().__init__(dim, max_seq_len, base)

    def build_rope_cache(self, max_seq_len: int = 4096) -> None:
        """Write the table, of the scaled frequencies; torchtune calls it once they are computed."""
        self.theta = self.theta / self.factor
        super().build_rope_cache(max_seq_len)


def gemma3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    query_pre_attn_scalar: float,
    sliding_window_size: int,
    global_layers: Sequence[int],
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    local_rope_base: float = 10_000.0,
    scale_factor: float = 1.0,
) -> TransformerDecoder:
    """Build the text decoder of a Gemma 3.

    Args:
        query_pre_attn_scalar: attention scores are divided by its root.
        sliding_window_size: tokens that a layer with a window sees.
        global_layers: indices of the layers that see all, every sixth as published.
        rope_base: of those layers.
        local_rope_base: of the layers with a window.
        scale_factor: of the positions of the layers that see all (linear): 8 from 4B on.
        vocab_size: as in torchtune's ``gemma2``; so are the others.
    """
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    ropes = {
        True: LinearRoPE(head_dim, max_seq_len, rope_base, factor=scale_factor),
        False: LinearRoPE(head_dim, max_seq_len, local_rope_base, is_local=True),
    }
    see_all = set(global_layers)

    def layer(index: int) -> TransformerSelfAttentionLayer:
        sees_all = index in see_all
        norms = ("sa_norm", "sa_scale", "mlp_norm", "mlp_scale")
        return TransformerSelfAttentionLayer(
            attn=attend_part(
                sizes,
                ropes[sees_all],
                norm=GemmaRMSNorm,
                window=None if sees_all else sliding_window_size,
                scale=query_pre_attn_scalar**-0.5,
            ),
            mlp=feed_forward(sizes, nn.GELU(approximate="tanh")),
            **{name: GemmaRMSNorm(embed_dim, norm_eps) for name in norms},
        )

    return decoder(sizes, layer, tied=True, norm=GemmaRMSNorm, embedding_scale=math.sqrt(embed_dim))
