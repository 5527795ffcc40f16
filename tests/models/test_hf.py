"""transformers' models through the second engine, against transformers' own full forward."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from helpers import family_models
from helpers.models import write_random
from ppl_eval.checkpoints.lazy_state_dict import load_into, under_own_names
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.models.decoder import Asked
from ppl_eval.models.hf import causal_lm
from ppl_eval.models.hf_decoder import HFDecoder
from ppl_eval.quantization.quantize import quantize
from ppl_eval.scoring.nll import ScoringModel

SIZES = family_models.SIZES | {"num_hidden_layers": 2}
HEADS = {"head_dim": 16}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 160}
# With more than ten, their order by number is not that by name.
EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
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
    "olmo2": ("Olmo2Config", {}, "sdpa"),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}, "sdpa"),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}, "sdpa"),
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
}
TOKENS_BT = torch.randint(3, 160, (2, 41), generator=torch.Generator().manual_seed(1))


def section(folder):
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "model_type": "TRANSFORMERS",
    }


def written(name, folder):
    kind, settings, attention = CASES[name]
    sizes = {} if settings is GPT else SIZES
    config = getattr(transformers, kind)(**{**sizes, **settings})
    return write_random(config, folder, seed=3), attention


def loaded(folder, attention="sdpa", dtype=torch.float32) -> HFDecoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            decoder = causal_lm(str(folder), attention)
    finally:
        torch.set_default_dtype(before)
    checkpoint = load_state_dict(section(folder))
    assert decoder.check(checkpoint.hf_config, Asked("", model_type="TRANSFORMERS")) == ("checked", [])
    load_into(decoder, under_own_names(decoder, checkpoint.state_dict)[0], dtype=dtype)
    decoder.module.eval().requires_grad_(False)
    decoder.prepare(torch.device("cpu"))
    decoder.check_head(torch.device("cpu"))
    return decoder


@torch.no_grad()
def full_forward(model):
    logits_BTV = model(TOKENS_BT[:, :-1]).logits.double()
    return -torch.log_softmax(logits_BTV, -1).gather(-1, TOKENS_BT[:, 1:, None]).flatten()


@torch.no_grad()
def scored(decoder):
    model = ScoringModel(decoder, max_logits_bytes=2**14)
    return model(TOKENS_BT[:, :-1].contiguous(), TOKENS_BT[:, 1:].contiguous())[0].double()


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_nll_of_transformers_own_forward(name, tmp_path, capsys):
    _, attention = written(name, tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    found_N = scored(loaded(tmp_path, attention))
    difference = float((found_N - full_forward(own)).abs().max())
    with capsys.disabled():
        print(f"\n  {name} ({type(own).__name__}, {attention}): largest token difference {difference:.1e}")
    assert difference < 1e-5 * max(1.0, float(found_N.max()))


def test_a_head_that_does_more_than_is_known_is_refused(tmp_path, monkeypatch):
    from ppl_eval.models import hf_decoder

    written("granite", tmp_path)
    monkeypatch.delitem(hf_decoder._FACTORS, "granite")
    with pytest.raises(ValueError, match="does something to its logits that is not known here"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "mamba2"])
def test_in_bfloat16_every_tensor_has_the_dtype_that_transformers_gives_it(name, tmp_path):
    _, attention = written(name, tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=attention, dtype=torch.bfloat16
    ).eval()
    decoder = loaded(tmp_path, attention, torch.bfloat16)
    for kind in ("named_parameters", "named_buffers"):
        theirs = {part: tensor.dtype for part, tensor in getattr(own, kind)()}
        for part, tensor in getattr(decoder.module, kind)():
            assert tensor.dtype == theirs[part], part
    torch.testing.assert_close(scored(decoder), full_forward(own), rtol=0, atol=0.05)


def test_weights_that_transformers_keeps_in_float32_are_not_cast_in_silence(tmp_path):
    written("deepseek_v3", tmp_path)
    with pytest.raises(ValueError, match=r"keeps \d+ weights of a DeepseekV3ForCausalLM in float32"):
        loaded(tmp_path, dtype=torch.bfloat16)


def test_joined_experts_count_as_not_quantised(tmp_path):
    written("mixtral", tmp_path)
    decoder = loaded(tmp_path)
    report = quantize(decoder, {"_component_": "torchao.quantization.Int8WeightOnlyConfig"}, "cpu")
    parts = ("gate_up_proj", "down_proj")
    experts = {f"model.layers.{n}.mlp.experts.{part}" for n in (0, 1) for part in parts}
    assert experts <= {name for name, _ in report.skipped}
    # The routers' matrices are no linear layers either.
    (note,) = (note for note in report.notes if "no linear layer" in note)
    assert note.endswith(f": {len(report.skipped)} layers")


def test_an_adapter_is_to_be_merged_first(tmp_path):
    written("llama", tmp_path)
    (tmp_path / "adapter_model.pt").touch()
    with pytest.raises(ValueError, match="merge the"):
        load_state_dict(section(tmp_path) | {"adapter_checkpoint": "adapter_model.pt"})


def test_tensors_that_have_no_place_are_refused(tmp_path):
    model, _ = written("mixtral", tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({**state, "model.layers.0.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.layers\.0\.extra\.weight"):
        loaded(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w')")
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    with pytest.raises(ValueError, match="transformers does not know the model"):
        causal_lm(str(tmp_path))
    assert not mark.exists()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config"):
        causal_lm(str(tmp_path))
    written("llama", tmp_path)
    with torch.device("meta"):
        decoder = causal_lm(str(tmp_path))
    with pytest.raises(ValueError, match="model_type=TRANSFORMERS"):
        decoder.check({"model_type": "llama"}, Asked("", model_type="LLAMA3"))
    own = json.loads((tmp_path / "config.json").read_text())
    asked = Asked("", model_type="TRANSFORMERS")
    assert decoder.check(own, asked) == ("checked", [])
    for beside, shown in (
        (own | {"rope_theta": 5.0}, r"differ in 1 keys \(rope_theta None and 5\.0\): the weights belong"),
        (own | {"num_hidden_layers": 3}, r"num_hidden_layers 2 and 3"),
        ({key: own[key] for key in own if key != "hidden_act"}, r"hidden_act silu and None"),
        (None, "no config.json to hold"),
    ):
        with pytest.raises(ValueError, match=shown):
            decoder.check(beside, asked)
    for axis in ("tp", "cp", "tensor_parallel_plan"):
        assert "not available for ppl_eval.models.hf" in decoder.supports(axis)
