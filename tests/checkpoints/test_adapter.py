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
        {"alpha_pattern": {"q": 2}},
        {"peft_type": "LOHA"},
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
