"""Bad input, in the recipe itself: one clear error, exit code 2, nothing scored."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

import distributed_ppl_eval
from helpers.tiny import write_config
from ppl_eval.distributed.rendezvous import EXIT_BAD_INPUT, Stop


@pytest.fixture
def refuse(tiny, tmp_path, private_home, capsys):
    """Run with these overrides; returns what stderr says."""

    def refuse(*overrides, folder=None):
        config = write_config(tmp_path / "config.yaml", folder or tiny.folder, tiny.text)
        with pytest.raises(Stop) as stop:
            distributed_ppl_eval.run(["--config", str(config), *overrides])
        assert stop.value.code == EXIT_BAD_INPUT
        said = capsys.readouterr().err
        assert said.count("error:") == 1
        assert "Traceback" not in said
        assert not (tmp_path / "out" / "result.json").exists()
        return said

    return refuse


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny model's folder, to be damaged."""
    return shutil.copytree(tiny.folder, tmp_path / "copy")


def test_missing_file(refuse):
    assert "no file is named 'nowhere.txt'" in refuse("dataset.paths=[nowhere.txt]")


def test_empty_file(refuse, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "has no text" in refuse(f"dataset.paths=[{tmp_path / 'empty.txt'}]")


def test_not_utf8(refuse, tmp_path):
    (tmp_path / "latin.txt").write_bytes("one\ntwo\nna\xefve".encode("latin-1"))
    said = refuse(f"dataset.paths=[{tmp_path / 'latin.txt'}]")
    assert "latin.txt is not UTF-8: byte 0xef at offset 10 (line 3)" in said


def test_protocol_that_is_none(refuse):
    own = "helpers.own_components.ListDataset"
    said = refuse(
        f"protocol={own}", "~protocol.max_seq_len", "protocol.samples=[]", "allow_components=helpers"
    )
    assert f"protocol._component_ is '{own}', which built a ListDataset" in said


def test_text_shorter_than_a_window(refuse, tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    said = refuse(f"dataset.paths=[{tmp_path / 'short.txt'}]")
    assert "not enough for one window" in said
    assert "protocol.max_seq_len" in said


def test_unknown_key(refuse):
    assert "did you mean 'batch_size'" in refuse("batch_sise=2")


def test_wrong_type_and_range(refuse):
    assert "batch_size is 'x'" in refuse("batch_size=x")
    assert "batch_size is 0" in refuse("batch_size=0")


def test_window_longer_than_the_model(refuse):
    said = refuse("protocol.max_seq_len=300")
    assert "protocol.max_seq_len is 300, but the model was built for 256 tokens" in said


def test_folder_without_weights(refuse, tmp_path):
    (tmp_path / "bare").mkdir()
    said = refuse(f"checkpointer.checkpoint_dir={tmp_path / 'bare'}")
    assert "model.safetensors" in said
    assert str(tmp_path / "bare") in said


def test_weights_of_another_checkpointer(refuse):
    said = refuse("checkpointer._component_=torchtune.training.FullModelMetaCheckpointer")
    assert "the weights have the names of torchtune.training.FullModelHFCheckpointer (model." in said
    assert "set it to torchtune.training.FullModelHFCheckpointer" in said


def test_distributed_checkpoint_of_torch(refuse, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.zeros(2)}, checkpoint_id=str(tmp_path / "dcp"))
    said = refuse(f"checkpointer.checkpoint_dir={tmp_path / 'dcp'}", "checkpointer.checkpoint_files=null")
    assert "is a distributed checkpoint of torch (.distcp files)" in said
    assert "torch.distributed.checkpoint.format_utils dcp_to_torch" in said


def test_a_head_of_its_own_where_the_config_ties_it(refuse, copy):
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    untied = "model._component_=torchtune.models.llama3_1.llama3_1"
    said = refuse(folder=copy)
    assert "choose the builder of an untied model" in said
    assert "set it to false there" in said
    said = refuse(untied, "~model.scale_factor", folder=copy)
    assert "set tie_word_embeddings to false in it and keep the builder" in said


def test_key_that_the_model_lacks(refuse, copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(128, 64)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "layers.7.mlp.w3.weight" in refuse(folder=copy)


def test_token_that_the_model_does_not_have(refuse, copy, tmp_path):
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {
            "id": 320,
            "content": "<more>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "more.txt").write_text("One.\n\nTwo <more> words.")
    said = refuse(
        f"dataset.paths=[{tmp_path / 'more.txt'}]",
        "dataset.unit=blank_line",
        "protocol={_component_: ppl_eval.protocols.rolling, max_seq_len: 64}",
        folder=copy,
    )
    assert "document 1 holds the token '<more>' (id 320) at position" in said
    assert "the model's vocabulary has 320" in said


def test_output_dir_not_writable(refuse, tmp_path):
    (tmp_path / "file").touch()
    said = refuse(f"output_dir={tmp_path / 'file' / 'out'}")
    assert "output_dir" in said
    assert "cannot be written" in said


def test_device_and_backend_that_are_not_there(refuse):
    if not torch.cuda.is_available():
        assert "device is 'cuda'" in refuse("device=cuda")
    assert "backend is 'carrier-pigeon'" in refuse("backend=carrier-pigeon")


def test_logits_budget_too_small(refuse):
    assert "raise max_logits_mib" in refuse("max_logits_mib=0.001")


def test_baseline_that_is_no_result(refuse, tmp_path):
    assert "baseline: cannot read" in refuse("baseline=nowhere.json")
    (tmp_path / "other.json").write_text("{}")
    assert "is not a result of this tool" in refuse(f"baseline={tmp_path / 'other.json'}")


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_without_its_package_is_told_before_anything_is_read(refuse, tmp_path):
    logger = "torchtune.training.metric_logging.WandBLogger"
    said = refuse(f"metric_logger={logger}", f"checkpointer.checkpoint_dir={tmp_path / 'nowhere'}")
    assert f"{logger} needs the package wandb, which is not installed: pip install wandb" in said


def test_nan_is_located(refuse, copy):
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    said = refuse(folder=copy)
    assert "window 0 (document 0, from its token 0) has NLL nan on rank 0" in said


def test_seed_rules(refuse, copy):
    torch.save({"seed": 7, "epochs_run": 1}, copy / "recipe_state.pt")
    assert "seed=7" in refuse(
        "seed_check=error", "checkpointer.recipe_checkpoint=recipe_state.pt", folder=copy
    )


def test_newer_architecture_is_refused_before_its_weights_are_read(refuse, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llama4"}))
    said = refuse(folder=copy)
    assert "model_type 'llama4', which torchtune 0.6.1 cannot build" in said
    assert "llama" in said.split("cannot build")[1]
