"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
import math

import gguf
import numpy as np
from safetensors.torch import load_file

from helpers import tiny_checkpoints as tiny

HF_TO_GGUF = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, hf, kind, architecture="llama", extra=lambda writer: None, rope_theta=10000.0):
    """What llama.cpp's converter does with a llama: q and k in the order of rotary pairs, lists of names and
    numbers. `extra` adds keys and tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(tiny.LAYERS)
    writer.add_embedding_length(tiny.DIM)
    writer.add_feed_forward_length(tiny.HIDDEN)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.VOCAB)
    for name, weight in hf.items():
        values = weight.float().numpy()
        for part, num_heads in (("q_proj", tiny.HEADS), ("k_proj", tiny.KV_HEADS)):
            if part in name:
                halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        target = {
            "lm_head.weight": "output.weight",
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }.get(name)
        if target is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{layer}.{HF_TO_GGUF[part]}.weight"
        if values.ndim == 1:
            writer.add_tensor(target, values.astype(np.float32))
        else:
            writer.add_tensor(
                target, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind
            )
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_family_gguf(path, folder, kind, *, lean=False):
    """What llama.cpp's converter (convert_hf_to_gguf.py) writes for a folder of any family.

    Names are the package's own (`gguf.get_tensor_name_map`). `lean` leaves out the sliding window, as old
    files do.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config["model_type"], config["model_type"]
    )
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config, lean)
    layers = config["num_hidden_layers"]
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, layers)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if architecture == "llama" and ".self_attn." in name and name.rsplit(".", 2)[1][0] in heads:
            values = _rotary_pairs(values, heads[name.rsplit(".", 2)[1][0]])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1:
            writer.add_tensor(target, values.astype(np.float32))
        else:
            values = np.ascontiguousarray(values)
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    _add_rope(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rotary_pairs(values, num_heads):
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_sizes(writer, config, lean):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    windows = {"gemma2": True, "phi3": True}
    if config["model_type"] in windows and config.get("sliding_window") and not lean:
        writer.add_sliding_window(config["sliding_window"])


def _add_rope(writer, config):
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _llama3_factors(rope, head_dim):
    """LlamaModel.generate_extra_tensors of llama.cpp's converter."""
    low, high = (rope[f"{which}_freq_factor"] for which in ("low", "high"))
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / high:
            factors.append(1)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
