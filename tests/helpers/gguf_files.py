"""GGUF files of tiny Llamas, as llama.cpp's converter writes them."""

import gguf
import numpy as np

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
