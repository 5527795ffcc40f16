"""Tiny random models: of torchtune's text families, alike on every rank, and of transformers, in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchtune.models.gemma import gemma
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerDecoder

from ppl_eval.models import attention, families
from ppl_eval.models.corrections import Phi3RoPE
from ppl_eval.models.gemma3 import gemma3
from ppl_eval.models.granite3 import granite3
from ppl_eval.models.mistral_nemo import mistral_nemo
from ppl_eval.models.olmo2 import olmo2
from ppl_eval.models.phi4_mini import phi4_mini
from ppl_eval.models.qwen3 import qwen3
from ppl_eval.models.smollm3 import smollm3

Build = Callable[[], TransformerDecoder]
# 101 is prime: no degree of parallelism divides the vocabulary.
VOCAB_SIZE = 101
_BODY = {"num_layers": 2, "num_heads": 12, "num_kv_heads": 12, "embed_dim": 48, "max_seq_len": 64}
_SIZES = {"vocab_size": VOCAB_SIZE, **_BODY}
_GROUPED = {**_SIZES, "num_kv_heads": 6}
_LONG = {"max_seq_len": 2048}
_GEMMA = {**_GROUPED, "head_dim": 8, "intermediate_dim": 36}
_GEMMA2 = {**_GEMMA, "hidden_capping_value": 5.0, "final_capping_value": 3.0, "sliding_window_size": 7}
_HEADS_OF_8 = {**_GROUPED, "head_dim": 8, "intermediate_dim": 36}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_GEMMA3 = {"query_pre_attn_scalar": 6.0, "sliding_window_size": 7, "global_layers": [1]}


def _mistral_with_window(window: int, **sizes: int) -> TransformerDecoder:
    model = mistral(**{**_GROUPED, **sizes}, intermediate_dim=36)
    for layer in model.layers:
        attention.install(layer.attn, window=window)
    return model


def _corrected_gemma2(**sizes: int) -> TransformerDecoder:
    model = gemma2(**{**_GEMMA2, **sizes})
    families.correct(model, "torchtune.models.gemma2.gemma2", None)
    return model


def _phi3_with_longrope() -> TransformerDecoder:
    model = phi3(**_GROUPED, intermediate_dim=36)
    # Sequences of more than 20 tokens turn to the long factors: the test's batches lie on both sides.
    rope = Phi3RoPE(4, 2, 10_000.0, short_factor=[1.0], long_factor=[3.0], original_max_seq_len=30)
    for layer in model.layers:
        layer.attn.pos_embeddings = rope
    return model


BUILDERS: dict[str, Build] = {
    "llama2": lambda: llama2(**_SIZES, intermediate_dim=36),
    "llama3": lambda: llama3_1(**_GROUPED, intermediate_dim=36),
    "llama3_tied": lambda: llama3_2(**_GROUPED, intermediate_dim=36),
    "mistral": lambda: _mistral_with_window(5),
    "gemma": lambda: gemma(**_GEMMA),
    "gemma2_as_torchtune_has_it": lambda: gemma2(**_GEMMA2),
    "llama3_long": lambda: llama3_1(**{**_GROUPED, **_LONG}, intermediate_dim=36),
    "mistral_long": lambda: _mistral_with_window(300, **_LONG),
    "gemma2_long": lambda: _corrected_gemma2(sliding_window_size=300, **_LONG),
    "gemma2": _corrected_gemma2,
    "phi3_longrope": _phi3_with_longrope,
    "phi3": lambda: phi3(**_GROUPED, intermediate_dim=36),
    "qwen2": lambda: qwen2(**_GROUPED, intermediate_dim=36),
    "qwen2_tied": lambda: qwen2(**_GROUPED, intermediate_dim=36, tie_word_embeddings=True),
    "mistral_nemo": lambda: mistral_nemo(**_HEADS_OF_8),
    "phi4_mini": lambda: phi4_mini(**_GROUPED, intermediate_dim=36),
    "qwen3": lambda: qwen3(**_HEADS_OF_8),
    "olmo2": lambda: olmo2(**_GROUPED, intermediate_dim=36),
    "granite3": lambda: granite3(**_HEADS_OF_8, **_GRANITE),
    "gemma3": lambda: gemma3(**_HEADS_OF_8, **_GEMMA3),
    "smollm3": lambda: smollm3(**_HEADS_OF_8, nope_layers=[1]),
}


def on_meta(model: str | Build) -> TransformerDecoder:
    """A model without values: one of ``BUILDERS`` by name, or what a function builds."""
    build = BUILDERS[model] if isinstance(model, str) else model
    with torch.device("meta"):
        return build().eval()


def random_weights(
    model: str | Build, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Its weights, large enough that every part of the model matters to the NLL, norms not all one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, parameter in on_meta(model).named_parameters():
        scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        values = torch.randn(parameter.shape, generator=generator) * scale
        weights[key] = (1 + values if key.endswith("scale") else values).to(dtype)
    return weights


def write_random(config: Any, folder: Path, seed: int = 0) -> Any:
    """Write transformers' model of a config with weights of which each matters to the NLL; returns it.

    Args:
        config: one of transformers' config classes.
        folder: where to write the model and its config.json.
        seed: of the weights.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    offset_norm = 0.0 if "gemma" in config.model_type else 1.0  # Gemma's norm weights are offsets from 1.
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            mean, std = (offset_norm, 0.3) if "norm" in name else (0.0, 0.7 if "embed" in name else 0.3)
            tensor.copy_(torch.empty_like(tensor).normal_(mean, std, generator=generator))
        for name in model.state_dict().keys() & dict(model.named_buffers()).keys():
            model.get_buffer(name).normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return model
