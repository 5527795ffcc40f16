"""OLMo 2: norms after attention and MLP, none before, and norms over all queries and all keys of a position.

Source: arXiv:2501.00656, section 2, and transformers' ``modeling_olmo2.py``.
"""

from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm, TransformerDecoder, TransformerSelfAttentionLayer

from ppl_eval.models.building import Sizes, attend_part, decoder, feed_forward


def olmo2(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    norm_eps: float = 1e-6,
    rope_base: float = 500_000.0,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build an OLMo 2; arguments as in torchtune's ``qwen2``."""
    head_dim = embed_dim // num_heads
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    rope = Qwen2RotaryPositionalEmbeddings(head_dim, max_seq_len, rope_base)

    def layer(index: int) -> TransformerSelfAttentionLayer:
        return TransformerSelfAttentionLayer(
            attn=attend_part(sizes, rope, norm=RMSNorm, whole_width=True),
            mlp=feed_forward(sizes),
            sa_scale=RMSNorm(embed_dim, eps=norm_eps),
            mlp_scale=RMSNorm(embed_dim, eps=norm_eps),
        )

    return decoder(sizes, layer, tied=tie_word_embeddings)
