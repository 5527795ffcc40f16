"""A tiny model with a broken embedding: whatever comes after one token is NaN, and nothing else is."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from helpers.models import write_random
from helpers.tiny import SHAPE, VOCAB_SIZE, write_tokenizer

# In no text of the tests but where it is put.
BROKEN = "@"
# The head is its own, so that the row is met by its token only.
MODEL = {
    "_component_": "torchtune.models.llama3.llama3",
    **{key: value for key, value in SHAPE.items() if key != "scale_factor"},
}


def write_models(whole: Path, broken: Path) -> int:
    """Write the same random llama twice, the second time with NaN in the embedding of ``BROKEN``.

    Returns:
        The token's id.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=SHAPE["embed_dim"],
        intermediate_size=SHAPE["intermediate_dim"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_kv_heads"],
        max_position_embeddings=SHAPE["max_seq_len"],
        rms_norm_eps=SHAPE["norm_eps"],
        rope_theta=float(SHAPE["rope_base"]),
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    for folder in (whole, broken):
        folder.mkdir(parents=True)
        write_tokenizer(folder)
        write_random(config, folder)
    tokenizer = Tokenizer.from_file(str(broken / "tokenizer.json"))
    (token,) = tokenizer.encode(BROKEN, add_special_tokens=False).ids
    weights: dict[str, Any] = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    return token
