"""Adapters are merged to the bits of torchtune's own merge, once and never twice."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torchtune.modules.peft import get_merged_lora_ckpt
from torchtune.training import FullModelHFCheckpointer

from helpers import tiny_checkpoints as tiny
from ppl_eval.checkpoints.load import load_state_dict

RANK, ALPHA = 4, 8
MODULES = [f"layers.{i}.attn.{p}" for i in range(tiny.LAYERS) for p in ("q_proj", "k_proj")] + [
    "layers.1.mlp.w2"
]


@pytest.fixture
def weights():
    return tiny.random_weights(tiny.tied)


def factors(weights, seed=3, scale=0.5, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for module in MODULES:
        rows, columns = weights[f"{module}.weight"].shape
        adapter[f"{module}.lora_a.weight"] = (torch.randn(RANK, columns, generator=generator) * scale).to(
            dtype
        )
        adapter[f"{module}.lora_b.weight"] = (torch.randn(rows, RANK, generator=generator) * scale).to(dtype)
    return adapter


def merge(weights, adapter, alpha=ALPHA):
    return get_merged_lora_ckpt({k: v.clone() for k, v in weights.items()} | adapter, rank=RANK, alpha=alpha)


@pytest.fixture
def trained(tmp_path, weights):
    """A base model, and the epoch folder that torchtune's LoRA recipe writes for it: (base section, epoch
    folder)."""
    base = tiny.write_hf(tmp_path / "base", weights)
    files = {"checkpoint_dir": base["checkpoint_dir"], "checkpoint_files": ["model.safetensors"]}
    checkpointer = FullModelHFCheckpointer(**files, model_type="LLAMA3_2", output_dir=str(tmp_path / "out"))
    checkpointer.load_checkpoint()
    adapter = factors(weights)
    config = {
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "k_proj", "w2"],
        "peft_type": "LORA",
    }
    state = {"model": merge(weights, adapter), "adapter": dict(adapter), "adapter_config": config}
    checkpointer.save_checkpoint(state, epoch=0, intermediate_checkpoint=False)
    return base, tmp_path / "out" / "epoch_0"


def assert_equal_weights(opened, expected):
    assert set(opened.state_dict) == set(expected)
    for name, value in expected.items():
        assert torch.equal(opened.state_dict[name], value), name


@pytest.mark.parametrize("file", ["adapter_model.pt", "adapter_model.safetensors", ""])
def test_both_forms_give_torchtunes_merged_weights(trained, weights, file):
    base, epoch = trained
    opened = load_state_dict(base | {"adapter_checkpoint": str(epoch / file)})
    merged = load_state_dict(base | {"checkpoint_dir": str(epoch)})
    assert_equal_weights(opened, dict(merged.state_dict))
    assert not torch.equal(opened.state_dict["layers.1.mlp.w2.weight"], weights["layers.1.mlp.w2.weight"])
    assert any("merged into 5 weights: rank 4, alpha 8" in note for note in opened.notes)
    assert any("was not merged: torchtune's weights contain it" in note for note in merged.notes)
    assert opened.identity != load_state_dict(base).identity


def test_second_merge_is_refused(trained, tmp_path):
    base, epoch = trained
    merged = base | {"checkpoint_dir": str(epoch)}
    with pytest.raises(ValueError, match=r"already contains the adapter.*same epoch folder"):
        load_state_dict(merged | {"adapter_checkpoint": str(epoch)})
    # Neither names nor places tell here: the weights themselves do.
    for name in ("adapter_model.pt", "adapter_model.safetensors"):
        apart = tmp_path / f"apart_{name}"
        apart.mkdir()
        shutil.copy(epoch / name, apart / name)
        shutil.copy(epoch / "adapter_config.json", apart)
        with pytest.raises(
            ValueError, match=r"already contains the adapter.*5 of 5 probed layers.*1\.0\d times"
        ):
            load_state_dict(merged | {"adapter_checkpoint": str(apart)})
    # Another adapter on top of a merged one is a base model like any other.
    other = tmp_path / "other"
    other.mkdir()
    torch.save(factors(tiny.random_weights(tiny.tied), seed=9), other / "adapter_model.pt")
    load_state_dict(merged | {"adapter_checkpoint": str(other), "lora_alpha": ALPHA})


def test_adapter_folder_without_weights_says_how_to_use_it(trained, tmp_path):
    base, epoch = trained
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(epoch / "adapter_model.pt", alone)
    with pytest.raises(ValueError, match=r"holds an adapter .* no weights: .*adapter_checkpoint to"):
        load_state_dict(base | {"checkpoint_dir": str(alone)})


def test_scale_must_be_known_and_is_read_once(trained, weights, tmp_path):
    base, epoch = trained
    shutil.copy(epoch / "adapter_model.pt", tmp_path / "bare.pt")
    bare = base | {"adapter_checkpoint": str(tmp_path / "bare.pt")}
    with pytest.raises(ValueError, match=r"set checkpointer\.lora_alpha"):
        load_state_dict(bare)
    opened = load_state_dict(bare | {"lora_alpha": 2})
    assert_equal_weights(opened, merge(weights, factors(weights), alpha=2))
    with pytest.raises(ValueError, match=r"lora_alpha is 2, adapter_config\.json says 8"):
        load_state_dict(base | {"adapter_checkpoint": str(epoch), "lora_alpha": 2})


def test_rank_stabilised_scale(trained, weights):
    base, epoch = trained
    path = epoch / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    opened = load_state_dict(base | {"adapter_checkpoint": str(epoch)})
    # alpha / sqrt(rank) = 2 * alpha / rank for rank 4
    assert_equal_weights(opened, merge(weights, factors(weights), alpha=2 * ALPHA))


def test_dora_in_torchtunes_form(trained, weights, tmp_path):
    base, _ = trained
    adapter = factors(weights)
    for module in MODULES:
        adapter[f"{module}.magnitude"] = torch.rand(len(weights[f"{module}.weight"])).to(torch.bfloat16) + 0.5
    torch.save(adapter, tmp_path / "dora.pt")
    opened = load_state_dict(base | {"adapter_checkpoint": str(tmp_path / "dora.pt"), "lora_alpha": ALPHA})
    assert_equal_weights(opened, merge(weights, adapter))


def test_what_cannot_be_merged_is_refused(trained, weights, tmp_path):
    base, epoch = trained
    path = epoch / "adapter_config.json"
    config = json.loads(path.read_text())
    for change in (
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"peft_type": "LOHA"},
        *({key: True} for key in ("fan_in_fan_out", "lora_bias", "use_qalora", "a_key_of_tomorrow")),
        *({key: [1]} for key in ("target_parameters", "trainable_token_indices", "layer_replication")),
        *({key: {"a": 1}} for key in ("megatron_config", "arrow_config", "kasa_config")),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=f"asks for .*{next(iter(change))}"):
            load_state_dict(base | {"adapter_checkpoint": str(epoch)})
    adapter = factors(weights)
    half = {k: v for k, v in adapter.items() if k != "layers.1.mlp.w2.lora_b.weight"}
    deeper = adapter | {k.replace("layers.1", "layers.7"): v for k, v in adapter.items()}
    wider = adapter | {"layers.1.mlp.w2.lora_b.weight": torch.ones(9, RANK, dtype=torch.bfloat16)}
    for content, told in (
        (half, r"lacks layers\.1\.mlp\.w2\.lora_b\.weight"),
        (deeper, r"not in the model \(3\): layers\.7\.attn\.k_proj"),
        (
            wider,
            r"wrongly shaped \(1\): layers\.1\.mlp\.w2\.weight \(adapter \[9, 128\], model \[64, 128\]\)",
        ),
        (adapter | {"norm.scale": torch.ones(64)}, r"more than linear layers(.|\n)*norm\.scale"),
    ):
        torch.save(content, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=told):
            load_state_dict(base | {"adapter_checkpoint": str(tmp_path / "bad.pt"), "lora_alpha": ALPHA})


PEFT_LAYERS = {
    "LLAMA3_2": {"self_attn.q_proj": (48, 32), "self_attn.k_proj": (24, 32), "mlp.up_proj": (40, 32)},
    "GEMMA2": {"self_attn.q_proj": (48, 32), "self_attn.k_proj": (24, 32), "mlp.up_proj": (40, 32)},
    "QWEN2": {"self_attn.q_proj": (48, 32), "self_attn.k_proj": (24, 32), "mlp.down_proj": (32, 40)},
    "PHI3_MINI": {"self_attn.qkv_proj": (64, 32), "mlp.gate_up_proj": (80, 32)},
}


@pytest.mark.parametrize("model_type", PEFT_LAYERS)
def test_peft_rows_follow_the_familys_own_conversion(tmp_path, model_type):
    """Merging in Hugging Face's names and converting gives what converting and merging gives; head_dim 12 is
    not 32/4."""
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 12} if model_type != "PHI3_MINI" else {}
    generator = torch.Generator().manual_seed(0)
    base, merged, adapter = {}, {}, {}
    for part, (rows, columns) in PEFT_LAYERS[model_type].items():
        name = f"model.layers.0.{part}"
        base[f"{name}.weight"] = torch.randn(rows, columns, generator=generator)
        a, b = torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator)
        adapter |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[f"{name}.weight"] = base[f"{name}.weight"] + ALPHA / RANK * b @ a
    sections = []
    for name, content in (("base", base), ("merged", merged)):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        sections.append(
            {"_component_": tiny.HF, "checkpoint_dir": str(tmp_path / name), "model_type": model_type}
        )
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    opened = load_state_dict(sections[0] | {"adapter_checkpoint": str(tmp_path), "lora_alpha": ALPHA})
    expected = load_state_dict(sections[1])
    assert set(opened.state_dict) == set(expected.state_dict)
    for name in expected.state_dict:
        torch.testing.assert_close(opened.state_dict[name], expected.state_dict[name])


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "new"])
def test_an_adapter_of_a_changed_base_is_refused(trained, initial):
    base, epoch = trained
    path = epoch / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": initial}))
    with pytest.raises(ValueError, match=f"init_lora_weights '{initial}', which changes the base"):
        load_state_dict(base | {"adapter_checkpoint": str(epoch)})


def test_what_peft_writes_by_default_is_harmless(trained, weights):
    """The keys of PEFT 0.21 with the values that LoraConfig() gives them."""
    base, epoch = trained
    path = epoch / "adapter_config.json"
    empty = ("alora_invocation_tokens", "arrow_config", "auto_mapping", "bias", "corda_config", "eva_config")
    empty += ("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform")
    empty += ("lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision")
    empty += ("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config")
    written = dict.fromkeys(empty) | {"bias": "none", "alpha_pattern": {}, "rank_pattern": {}}
    written |= {"inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.05, "loftq_config": {}}
    written |= dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"), False)
    written |= {"megatron_core": "megatron.core", "qalora_group_size": 16, "task_type": "CAUSAL_LM"}
    written |= {
        "ensure_weight_tying": False,
        "peft_version": "0.21.2",
        "base_model_name_or_path": "somewhere",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | written))
    opened = load_state_dict(base | {"adapter_checkpoint": str(epoch)})
    assert_equal_weights(opened, merge(weights, factors(weights)))


def peft_folder(folder, base, ranks, **config):
    """Writes an adapter in PEFT's form; returns the weights merged by PEFT's formula, in HF names."""
    hf = {k: v.float() for k, v in base.items()}
    generator, adapter = torch.Generator().manual_seed(4), {}
    for name, (rank, scale) in ranks.items():
        rows, columns = hf[f"{name}.weight"].shape
        a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
        adapter |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        hf[f"{name}.weight"] = hf[f"{name}.weight"] + scale * b @ a
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | config))
    return hf


def test_ranks_and_alphas_of_single_modules_follow_pefts_patterns(tmp_path):
    weights = tiny.random_weights(tiny.tied, torch.float32)
    q, k, down = (
        f"model.layers.{part}" for part in ("0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.down_proj")
    )
    # The first pattern that matches the end of a name wins; the others have r and lora_alpha. rsLoRA: roots.
    config = {"r": 4, "lora_alpha": 8, "use_rslora": True}
    config |= {"rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 16}}
    config |= {"alpha_pattern": {r".*\.0\.self_attn\.q_proj": 6, "q_proj": 12}}
    ranks = {q: (4, 6 / 2), k: (9, 12 / 3), down: (16, 8 / 4)}
    merged = peft_folder(tmp_path / "adapter", tiny.to_hf(weights), ranks, **config)
    base = tiny.write_hf(tmp_path / "base", weights)
    opened = load_state_dict(base | {"adapter_checkpoint": str(tmp_path / "adapter")})
    (tmp_path / "merged").mkdir()
    save_file({k: v.contiguous() for k, v in merged.items()}, tmp_path / "merged" / "model.safetensors")
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "merged")
    expected = load_state_dict(base | {"checkpoint_dir": str(tmp_path / "merged")})
    for name in expected.state_dict:
        torch.testing.assert_close(opened.state_dict[name], expected.state_dict[name])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(config | {"rank_pattern": {}}))
    with pytest.raises(ValueError, match=r"rank 4, its factors have rank (9|16)"):
        load_state_dict(base | {"adapter_checkpoint": str(tmp_path / "adapter")})


def test_an_update_of_a_tied_head_is_refused_with_a_hint(tmp_path):
    weights = tiny.random_weights(tiny.tied, torch.float32)
    hf = tiny.to_hf(weights)
    head = {"lm_head.weight": hf["model.embed_tokens.weight"]}
    peft_folder(tmp_path / "adapter", hf | head, {"lm_head": (4, 2.0)}, lora_alpha=8)
    base = tiny.write_hf(tmp_path / "base", weights)
    with pytest.raises(ValueError, match=r"output\.weight(.|\n)*the checkpoint's head is its embedding"):
        load_state_dict(base | {"adapter_checkpoint": str(tmp_path / "adapter")})
