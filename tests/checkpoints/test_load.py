"""Every form of checkpoint gives the model that torchtune alone would give, and every bad one is named."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import tiny_checkpoints as tiny
from helpers.models import on_meta
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict


def load(build, section, dtype=torch.bfloat16):
    opened = load_state_dict(section)
    model = on_meta(build)
    opened.notes += load_into(model, opened.state_dict, dtype=dtype)
    return model, opened


def assert_same_model(model, expected):
    assert torch.equal(tiny.logits(model), tiny.logits(expected))


@pytest.fixture
def weights():
    return tiny.random_weights(tiny.tied)


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hf_folder(tmp_path, weights, num_files, dtype):
    model, opened = load(tiny.tied, tiny.write_hf(tmp_path, weights, num_files=num_files), dtype)
    assert_same_model(model, tiny.reference(tiny.tied, {k: v.to(dtype) for k, v in weights.items()}))
    assert len(opened.identity) == num_files
    assert opened.hf_config["hidden_size"] == tiny.DIM
    assert not opened.quantized
    assert any("converted from bf16 to fp32" in note for note in opened.notes) == (dtype == torch.float32)


def test_named_files_and_torchtunes_pattern(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights, num_files=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="no weights in"):
        load_state_dict(section)
    names = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    pattern = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}
    for files in (names, pattern):
        model, _ = load(tiny.tied, section | {"checkpoint_files": files})
        assert_same_model(model, tiny.reference(tiny.tied, weights))
    with pytest.raises(ValueError, match=r"1 of 3 checkpoint files are missing.*model-00003-of-00003"):
        load_state_dict(section | {"checkpoint_files": [*names, "model-00003-of-00003.safetensors"]})


def test_hf_pickled_weights(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model, _ = load(tiny.tied, section)
    assert_same_model(model, tiny.reference(tiny.tied, weights))


@pytest.mark.parametrize("build", [tiny.tied, tiny.untied])
def test_meta_file(tmp_path, build):
    weights = tiny.random_weights(build)
    extra = {"output.weight": weights["tok_embeddings.weight"].clone()} if build is tiny.tied else {}
    model, opened = load(build, tiny.write_meta(tmp_path, weights | extra))
    assert_same_model(model, tiny.reference(build, weights))
    assert opened.hf_config is None


def test_meta_slices_are_refused(tmp_path, weights):
    section = tiny.write_meta(tmp_path, weights)
    (tmp_path / "consolidated.01.pth").write_bytes((tmp_path / "consolidated.00.pth").read_bytes())
    with pytest.raises(ValueError, match="model parallelism"):
        load_state_dict(section | {"checkpoint_files": ["consolidated.00.pth", "consolidated.01.pth"]})


@pytest.mark.parametrize("new_format", [True, False])
def test_torchtune_file(tmp_path, weights, new_format):
    section = tiny.write_tune(tmp_path, weights)
    torch.save({"model": weights}, tmp_path / "model.pt", _use_new_zipfile_serialization=new_format)
    model, opened = load(tiny.tied, section)
    assert_same_model(model, tiny.reference(tiny.tied, weights))
    assert any("every rank holds a copy" in note for note in opened.notes) != new_format


def test_last_epoch_of_a_training_run_with_its_recipe_state(tmp_path, weights):
    for epoch in (0, 2, 10):
        tiny.write_hf(tmp_path / f"epoch_{epoch}", tiny.random_weights(tiny.tied, seed=epoch), num_files=2)
    (tmp_path / "recipe_state").mkdir()
    state = {"seed": 1234, "epochs_run": 11, "optimizer": {"state": {0: torch.ones(3)}}, "total_epochs": 11}
    torch.save(state, tmp_path / "recipe_state" / "recipe_state.pt")
    section = {"_component_": tiny.HF, "checkpoint_dir": str(tmp_path), "model_type": "LLAMA3_2"}
    model, opened = load(tiny.tied, section)
    assert_same_model(model, tiny.reference(tiny.tied, tiny.random_weights(tiny.tied, seed=10)))
    assert opened.recipe_state == {"seed": 1234, "epochs_run": 11, "total_epochs": 11}
    assert any("epoch_10" in note for note in opened.notes)


def test_recipe_state_by_name(tmp_path, weights):
    section = tiny.write_hf(tmp_path / "model", weights)
    assert load_state_dict(section).recipe_state is None
    torch.save({"seed": torch.tensor(5)}, tmp_path / "state.pt")
    assert load_state_dict(section | {"recipe_checkpoint": "state.pt"}).recipe_state == {"seed": 5}
    with pytest.raises(ValueError, match=r"recipe_checkpoint other\.pt was not found"):
        load_state_dict(section | {"recipe_checkpoint": "other.pt"})


def test_tied_model_accepts_a_repeated_head_and_refuses_another(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights)
    hf = tiny.to_hf(weights)
    save_file(
        hf | {"lm_head.weight": hf["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    model, opened = load(tiny.tied, section)
    assert_same_model(model, tiny.reference(tiny.tied, weights))
    assert any("repeats its tied embedding" in note for note in opened.notes)
    save_file(hf | {"lm_head.weight": hf["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="differs from its embedding"):
        load(tiny.tied, section)


def test_untied_model_needs_its_head(tmp_path, weights):
    with pytest.raises(ValueError, match=r"missing \(1\): output\.weight(.|\n)*tied to its embedding"):
        load(tiny.untied, tiny.write_hf(tmp_path, weights))


def test_every_misfit_is_named_before_anything_is_loaded(tmp_path, weights):
    hf = tiny.to_hf(weights)
    section = tiny.write_hf(tmp_path, weights)
    gone = [name for name in hf if ".layers.1." in name]
    for name in gone:
        del hf[name]
    hf["model.layers.0.mlp.down_proj.weight"] = torch.ones(3, 5, dtype=torch.bfloat16)
    hf["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64, dtype=torch.bfloat16)
    save_file(hf, tmp_path / "model.safetensors")
    opened = load_state_dict(section)
    model = on_meta(tiny.tied)
    with pytest.raises(ValueError) as e:
        load_into(model, opened.state_dict, dtype=torch.bfloat16)
    told = str(e.value)
    assert f"missing ({len(gone)}): layers.1.attn.q_proj.weight" in told
    assert "unexpected (1): model.layers.0.self_attn.q_proj.bias" in told
    assert "wrongly shaped (1): layers.0.mlp.w2.weight (checkpoint [3, 5], model [64, 128])" in told
    assert all(p.is_meta for p in model.parameters())


def test_long_lists_are_counted_and_cut(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights)
    extra = {f"extra.w{i}": torch.ones(1) for i in range(25)}
    save_file(tiny.to_hf(weights) | extra, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected \(25\): .*\.\.\. and 15 more"):
        load(tiny.tied, section)


def test_shapes_that_contradict_config_json(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights, num_attention_heads=3)
    with pytest.raises(ValueError, match=r"4 tensors .* contradict: .*self_attn\.q_proj\.weight \[64, 64\]"):
        load_state_dict(section)


def test_unknown_names_in_the_section(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights)
    for change, told in (
        ({"checkpoint_fiels": []}, r"unknown keys \['checkpoint_fiels'\]"),
        ({"model_type": "LLAMA9"}, "model_type is 'LLAMA9'; text decoders are"),
        ({"_component_": "torchtune.training.DistributedCheckpointer"}, "can be one of"),
        ({"checkpoint_dir": str(tmp_path / "nowhere")}, "is not a folder"),
    ):
        with pytest.raises(ValueError, match=told):
            load_state_dict(section | change)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"needs config\.json"):
        load_state_dict(section)


def test_damaged_safetensors_are_named_with_their_sizes(tmp_path, weights):
    section = tiny.write_hf(tmp_path, weights)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content, told in (
        (
            whole[:-100],
            rf"model\.safetensors is truncated: expected {len(whole)} bytes, found {len(whole) - 100}",
        ),
        (whole[:50], r"truncated: expected at least \d+ bytes for the header alone, found 50"),
        (
            whole + b"x",
            rf"longer than its header says\): expected {len(whole)} bytes, found {len(whole) + 1}",
        ),
        (whole[:8] + b"x" + whole[9:], "corrupt: its safetensors header cannot be read"),
        (b"\xff" * 100, "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"", r"empty \(0 bytes\)"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=told):
            load_state_dict(section)


def test_damaged_torch_files_are_named_with_their_sizes(tmp_path, weights):
    section = tiny.write_tune(tmp_path, weights)
    path = tmp_path / "model.pt"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    start = whole.index(b"data.pkl") + 200
    flipped[start : start + 30] = b"\xee" * 30
    for content, told in (
        (whole[: len(whole) // 2], f"truncated after {len(whole) // 2} bytes"),
        (whole[:100], "truncated after 100 bytes"),
        (bytes(flipped), rf"\({len(whole)} bytes\) is corrupt or no torch checkpoint"),
        (b"hello" * 100, r"\(500 bytes\) is corrupt or no torch checkpoint"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=told):
            load_state_dict(section)


class Malicious:
    """Leaves a mark when a file that holds it is unpickled carelessly."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("form", ["zip", "old", "truncated", "pickle"])
def test_malicious_pickle_does_not_run(tmp_path, weights, form):
    section = tiny.write_tune(tmp_path, weights)
    mark, path = tmp_path / "mark", tmp_path / "model.pt"
    content = weights | {"payload": Malicious(mark)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content["payload"], protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form != "old")
    if form == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        ValueError, match="is truncated" if form == "truncated" else "mkdir.*allow_unsafe_pickle"
    ):
        load_state_dict(section)
    assert not mark.exists()


def test_unsafe_pickle_can_be_permitted(tmp_path, weights):
    section = tiny.write_tune(tmp_path / "model", weights)
    mark = tmp_path / "mark"
    torch.save(weights, tmp_path / "model" / "model.pt")
    torch.save({"seed": 3, "x": Malicious(mark)}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"asks for posix\.mkdir"):
        load_state_dict(section | {"recipe_checkpoint": "state.pt"})
    assert not mark.exists()
    opened = load_state_dict(section | {"recipe_checkpoint": "state.pt", "allow_unsafe_pickle": True})
    assert opened.recipe_state["seed"] == 3
    assert mark.exists()
    assert any("its code ran" in note for note in opened.notes)


def test_identity_tells_trainings_of_one_model_apart(tmp_path):
    one, two = (
        load_state_dict(tiny.write_hf(tmp_path / name, tiny.random_weights(tiny.tied, seed=seed)))
        for name, seed in (("a", 0), ("b", 1))
    )
    again = load_state_dict(tiny.write_hf(tmp_path / "c", tiny.random_weights(tiny.tied, seed=0)))
    assert one.identity == again.identity != two.identity
    json.dumps(one.identity)


def test_reading_is_lazy(tmp_path, weights):
    opened = load_state_dict(tiny.write_hf(tmp_path, weights))
    (tmp_path / "model.safetensors").unlink()
    assert opened.state_dict.meta["layers.0.attn.q_proj.weight"].shape == (64, 64)
    with pytest.raises(FileNotFoundError):
        opened.state_dict["norm.scale"]


def test_a_model_type_of_another_family_is_named_and_not_config_json(tmp_path):
    section = tiny.write_hf(tmp_path, tiny.random_weights(tiny.tied))
    with pytest.raises(ValueError, match=r"model_type is PHI3_MINI, .*model_type=LLAMA2 or LLAMA3"):
        load_state_dict(section | {"model_type": "PHI3_MINI"})
