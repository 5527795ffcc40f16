"""Phi-4-mini: Phi-3 whose head is its embedding. Partial rotation and LongRoPE are the corrections of Phi-3.

Source: arXiv:2503.01743, section 2, and transformers' ``modeling_phi3.py``.
"""

from torchtune.models.phi3 import phi3
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear


def phi4_mini(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    norm_eps: float = 1e-5,
    rope_base: float = 10_000.0,
    tie_word_embeddings: bool = True,
) -> TransformerDecoder:
    """Build any Phi-3 of transformers' ``Phi3ForCausalLM``; arguments as in torchtune's ``phi3``."""
    model = phi3(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        norm_eps=norm_eps,
        rope_base=rope_base,
    )
    if tie_word_embeddings:
        # A tied head is no module, and cannot take the place of one.
        del model.output
        model.output = TiedLinear(model.tok_embeddings)
    return model
