"""Mistral models whose heads are smaller than width / heads: Nemo, Small and Ministral.

torchtune's ``mistral`` has no argument for it. Weights and rotary pairs are as torchtune has them.
"""

from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

from ppl_eval.models.building import Sizes, attend_part, decoder, pre_norm_layer


def mistral_nemo(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    norm_eps: float = 1e-5,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build any Mistral of transformers' ``MistralForCausalLM``; its window comes from config.json."""
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    rope = RotaryPositionalEmbeddings(head_dim, max_seq_len, rope_base)
    return decoder(
        sizes, lambda index: pre_norm_layer(sizes, attend_part(sizes, rope)), tied=tie_word_embeddings
    )
