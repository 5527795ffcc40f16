"""Tiny random models written to disk in every form that the loader reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchtune.models.convert_weights import tune_to_hf, tune_to_meta
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_2 import llama3_2

from helpers import models

HEADS, KV_HEADS, DIM, HIDDEN, LAYERS, VOCAB = 4, 2, 64, 128, 2, 96
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "embed_dim": DIM,
}
HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}
HF = "torchtune.training.FullModelHFCheckpointer"
META = "torchtune.training.FullModelMetaCheckpointer"
TUNE = "torchtune.training.FullModelTorchTuneCheckpointer"


def tied() -> nn.Module:
    """A Llama 3.2 whose head is its embedding."""
    return llama3_2(**SIZES, max_seq_len=256, intermediate_dim=HIDDEN, scale_factor=1)


def untied() -> nn.Module:
    """A Llama 2 with a head of its own."""
    return llama2(**SIZES, max_seq_len=256, intermediate_dim=HIDDEN)


def random_weights(build, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict under torchtune's names."""
    return models.random_weights(build, seed, dtype)


def reference(build, weights: dict[str, torch.Tensor]) -> nn.Module:
    """The model that loading must give, made by torchtune alone."""
    model = build()
    model.load_state_dict(weights, assign=True)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    """Logits of a fixed input, shape [2, 17, vocabulary]."""
    tokens_BT = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(tokens_BT)


def to_hf(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's names and row order."""
    return {k: v.contiguous() for k, v in tune_to_hf(weights, HEADS, KV_HEADS, DIM).items()}


def write_hf(folder: Path, weights: dict[str, torch.Tensor], *, num_files: int = 1, **config) -> dict:
    """Writes an HF folder and returns the `checkpointer` section for it, which names no files."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = to_hf(weights)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
    if num_files == 1:
        save_file(hf, folder / "model.safetensors")
    else:
        weight_map = {}
        for i in range(num_files):
            part = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
            names = list(hf)[i::num_files]
            save_file({name: hf[name] for name in names}, folder / part)
            weight_map |= dict.fromkeys(names, part)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"_component_": HF, "checkpoint_dir": str(folder), "model_type": "LLAMA3_2"}


def write_meta(folder: Path, weights: dict[str, torch.Tensor]) -> dict:
    """Writes Meta's consolidated.00.pth."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tune_to_meta(weights) | {"rope.freqs": torch.ones(8)}, folder / "consolidated.00.pth")
    section = {"_component_": META, "checkpoint_dir": str(folder), "model_type": "LLAMA2"}
    return section | {"checkpoint_files": ["consolidated.00.pth"]}


def write_tune(folder: Path, weights: dict[str, torch.Tensor]) -> dict:
    """Writes torchtune's own form."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / "model.pt")
    section = {"_component_": TUNE, "checkpoint_dir": str(folder), "model_type": "LLAMA3_2"}
    return section | {"checkpoint_files": ["model.pt"]}
