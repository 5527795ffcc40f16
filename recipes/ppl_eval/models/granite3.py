"""Granite 3, the dense models: a Llama with four multipliers.

On embeddings, on attention scores (in the place of head_dim ** -0.5), on what attention and MLP add to the
residual stream; logits are divided by the fourth.
Source: arXiv:2408.13359 and transformers' ``modeling_granite.py``.
"""

from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

from ppl_eval.models.building import Sizes, attend_part, decoder, pre_norm_layer


def granite3(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int,
    max_seq_len: int,
    embedding_multiplier: float,
    attention_multiplier: float,
    residual_multiplier: float,
    logits_scaling: float,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000.0,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """Build a dense Granite 3; the multipliers are named as in config.json, the rest as in torchtune."""
    sizes = Sizes(
        *(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim),
        *(head_dim, max_seq_len, norm_eps),
    )
    rope = RotaryPositionalEmbeddings(head_dim, max_seq_len, rope_base)
    model = decoder(
        sizes,
        lambda index: pre_norm_layer(
            sizes, attend_part(sizes, rope, scale=attention_multiplier), residual_multiplier
        ),
        tied=tie_word_embeddings,
        embedding_scale=embedding_multiplier,
    )
    # ``TorchtuneDecoder.head`` divides by it.
    model.logits_scaling = logits_scaling
    return model
