"""Qwen 3, the dense models: Qwen 2 without biases, with norms on the queries and keys of each head.

Source: arXiv:2505.09388, section 2, and transformers' ``modeling_qwen3.py``.
"""

from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm, TransformerDecoder

from ppl_eval.models.building import Sizes, attend_part, decoder, pre_norm_layer


def qwen3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build a dense Qwen 3; arguments as in torchtune's ``qwen2``, and ``head_dim``, the size of a head."""
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    rope = Qwen2RotaryPositionalEmbeddings(head_dim, max_seq_len, rope_base)
    return decoder(
        sizes,
        lambda index: pre_norm_layer(sizes, attend_part(sizes, rope, norm=RMSNorm)),
        tied=tie_word_embeddings,
    )
