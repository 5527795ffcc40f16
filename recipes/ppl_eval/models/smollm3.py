"""SmolLM3: a Llama of which some layers, every fourth as published, are without positions (NoPE).

Source: transformers' ``modeling_smollm3.py``.
"""

from collections.abc import Sequence

from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

from ppl_eval.models.building import Sizes, attend_part, decoder, pre_norm_layer


def smollm3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    nope_layers: Sequence[int],
    norm_eps: float = 1e-6,
    rope_base: float = 2_000_000.0,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """Build a SmolLM3.

    Args:
        nope_layers: indices of the layers without positions: those with a 0 in ``no_rope_layers``.
        vocab_size: as in torchtune's ``llama3_2``; so are the others.
    """
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    rope = RotaryPositionalEmbeddings(head_dim, max_seq_len, rope_base)
    without = set(nope_layers)
    return decoder(
        sizes,
        lambda index: pre_norm_layer(sizes, attend_part(sizes, None if index in without else rope)),
        tied=tie_word_embeddings,
    )
