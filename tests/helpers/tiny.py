"""A tiny random model with a tokenizer of its own, as a Hugging Face style folder, and the config that scores
it."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from helpers.models import write_random
from helpers.tiny_tokenizers import byte_level_bpe, write_folder

VOCAB_SIZE = 320
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 256,
    "intermediate_dim": 128,
    "rope_base": 10000,
    "norm_eps": 1e-5,
    "scale_factor": 1,
}
MODEL = {"_component_": "torchtune.models.llama3_2.llama3_2", **SHAPE}
TEXT = "\n".join(
    f"Line {i}: the quick brown fox, number {i * i}, jumps over {i % 7} lazy dogs; naïve café 漢字 🙂."
    for i in range(120)
)


def write_tokenizer(folder: Path) -> None:
    """The tokenizer of ``TEXT``, as a folder has it."""
    write_folder(byte_level_bpe(TEXT, VOCAB_SIZE), folder, "</s>")


def write_model(folder: Path, seed: int = 0, **sizes: int) -> Any:
    """Write a random llama with tied embeddings by transformers; its logits are far from uniform. Returns the
    model.

    Args:
        folder: where to write it.
        seed: of its weights.
        **sizes: sizes other than those of ``SHAPE``.
    """
    from transformers import LlamaConfig

    shape = {**SHAPE, **sizes}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape["embed_dim"],
        intermediate_size=shape["intermediate_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=shape["max_seq_len"],
        rms_norm_eps=shape["norm_eps"],
        rope_theta=float(shape["rope_base"]),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return write_random(config, folder, seed)


def write_config(path: Path, folder: Path, text: Path, **keys: Any) -> Path:
    """A config that scores ``text`` with the tiny model of ``folder``.

    Args:
        path: the file to write.
        folder: as ``write_model`` and ``write_tokenizer`` left it.
        text: a text file.
        **keys: keys at the top of the config, over the defaults here.
    """
    config = {
        "output_dir": str(path.parent / "out"),
        "model": MODEL,
        "tokenizer": {
            "_component_": "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer",
            "tokenizer_json_path": str(folder / "tokenizer.json"),
            "tokenizer_config_json_path": str(folder / "tokenizer_config.json"),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": ["model.safetensors"],
            "model_type": "LLAMA3_2",
        },
        "dataset": {"_component_": "ppl_eval.data.text_files", "paths": [str(text)]},
        "protocol": {"_component_": "ppl_eval.protocols.disjoint", "max_seq_len": 64},
        "batch_size": 2,
        "device": "cpu",
        "dtype": "fp32",
        **keys,
    }
    OmegaConf.save(OmegaConf.create(config), path)
    return path
