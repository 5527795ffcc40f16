"""Tiny random models of transformers' architectures, written as folders, and loaded by the second engine."""

from pathlib import Path
from typing import Any

import torch
import transformers

from helpers import family_models
from helpers.models import write_random
from ppl_eval.checkpoints.lazy_state_dict import load_into, under_own_names
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.models.decoder import Asked
from ppl_eval.models.hf import causal_lm
from ppl_eval.models.hf_decoder import HFDecoder

SIZES = family_models.SIZES | {"num_hidden_layers": 2}
HEADS = {"head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 160}
# With more than ten, their order by number is not that by name.
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **LATENT,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
HYBRID = {**MAMBA, "num_local_experts": 4, "layer_types": ["mamba", "attention"], "logits_scaling": 3.0}
# Config class, what differs from SIZES, attention.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "sdpa"),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}, "sdpa"),
    "mistral": ("MistralConfig", {"sliding_window": 16}, "sdpa"),
    "qwen2": ("Qwen2Config", {}, "sdpa"),
    "qwen3": ("Qwen3Config", HEADS, "sdpa"),
    "phi3": ("Phi3Config", {}, "sdpa"),
    "phi3_longrope": (
        "Phi3Config",
        {"rope_parameters": family_models.LONGROPE, "original_max_position_embeddings": 32},
        "sdpa",
    ),
    "olmo2": ("Olmo2Config", {}, "sdpa"),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, "sdpa"),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}, "sdpa"),
    "cohere_qk_norm": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}, "sdpa"),
    "gemma": ("GemmaConfig", HEADS, "sdpa"),
    "gemma2": ("Gemma2Config", {**HEADS, "final_logit_softcapping": 3.0, "sliding_window": 16}, "eager"),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 16, "final_logit_softcapping": 2.0}, "eager"),
    "starcoder2": ("Starcoder2Config", {}, "sdpa"),
    "stablelm": ("StableLmConfig", {}, "sdpa"),
    "glm4": ("Glm4Config", HEADS, "sdpa"),
    "smollm3": ("SmolLM3Config", {}, "sdpa"),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, "sdpa"),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEADS, **EXPERTS}, "sdpa"),
    "olmoe": ("OlmoeConfig", EXPERTS, "sdpa"),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "logits_scaling": 6.0}, "sdpa"),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK, "sdpa"),
    "gpt_oss": ("GptOssConfig", {**HEADS, "num_local_experts": 4, "sliding_window": 16}, "eager"),
    "gpt_neox": ("GPTNeoXConfig", {}, "sdpa"),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.3, "sliding_window": 16}, "sdpa"),
    "olmo3": ("Olmo3Config", {"sliding_window": 16}, "sdpa"),
    "exaone4": ("Exaone4Config", {"sliding_window": 16}, "sdpa"),
    "nemotron": ("NemotronConfig", {}, "sdpa"),
    "falcon": ("FalconConfig", {}, "sdpa"),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}, "eager"),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4}, "sdpa"),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}, "eager"),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}, "sdpa"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", HYBRID, "sdpa"),
    "gpt2": ("GPT2Config", GPT, "sdpa"),
    "opt": ("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 96}, "sdpa"),
    "minicpm3": ("MiniCPM3Config", {**LATENT, "num_key_value_heads": 4, "dim_model_base": 24}, "sdpa"),
}


def section(folder: Path) -> dict[str, Any]:
    """The ``checkpointer`` section for a folder."""
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "model_type": "TRANSFORMERS",
    }


def written(name: str, folder: Path) -> tuple[Any, str]:
    """Write a case; returns transformers' model and the attention that it wants."""
    kind, settings, attention = CASES[name]
    sizes = {} if settings is GPT else SIZES
    config = getattr(transformers, kind)(**{**sizes, **settings})
    return write_random(config, folder, seed=3), attention


def on_meta(folder: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> HFDecoder:
    """The decoder of a folder, without weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return causal_lm(str(folder), attention)
    finally:
        torch.set_default_dtype(before)


def loaded(folder: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> HFDecoder:
    """The decoder of a folder, checked and filled."""
    decoder = on_meta(folder, attention, dtype)
    checkpoint = load_state_dict(section(folder))
    assert decoder.check(checkpoint.hf_config, Asked("", model_type="TRANSFORMERS")) == ("checked", [])
    load_into(decoder, under_own_names(decoder, checkpoint.state_dict)[0], dtype=dtype)
    decoder.module.eval().requires_grad_(False)
    decoder.prepare(torch.device("cpu"))
    decoder.check_head(torch.device("cpu"))
    return decoder
