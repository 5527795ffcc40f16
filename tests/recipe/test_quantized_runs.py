"""Quantised runs: the same bits on 1, 2 and 3 processes, and from a checkpoint that was quantised before."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2

from helpers.runs import many, result_of
from helpers.tiny import SHAPE, TEXT, write_config, write_tokenizer
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.commands import cli

# As wide as the widest group.
WIDE = {**SHAPE, "embed_dim": 256, "intermediate_dim": 256, "num_layers": 1}
TORCHTUNE = "quantizer._component_=torchtune.training.quantization."
TORCHAO = "quantizer._component_=torchao.quantization."
SCHEMES = {
    **{
        f"int4_{g}": [f"{TORCHTUNE}Int4WeightOnlyQuantizer", f"quantizer.groupsize={g}"]
        for g in (32, 64, 128, 256)
    },
    "8da4w": [f"{TORCHTUNE}Int8DynActInt4WeightQuantizer", "quantizer.groupsize=64"],
    "int8": [f"{TORCHAO}Int8WeightOnlyConfig"],
    "8da8w": [f"{TORCHAO}Int8DynamicActivationInt8WeightConfig"],
    "awq": [],
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny model of width 256, a text to score and another to calibrate with."""
    folder = tmp_path_factory.mktemp("wide")
    write_tokenizer(folder)
    torch.manual_seed(0)
    model = llama3_2(**WIDE)
    weights = {
        name: torch.randn_like(w) * (0.6 if "tok" in name else 0.1) + (1 if "scale" in name else 0)
        for name, w in model.state_dict().items()
    }
    hf = tune_to_hf(weights, WIDE["num_heads"], WIDE["num_kv_heads"], WIDE["embed_dim"])
    save_file({k: v.contiguous().bfloat16() for k, v in hf.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": WIDE["embed_dim"],
        "intermediate_size": WIDE["intermediate_dim"],
        "num_hidden_layers": WIDE["num_layers"],
        "num_attention_heads": WIDE["num_heads"],
        "num_key_value_heads": WIDE["num_kv_heads"],
        "vocab_size": WIDE["vocab_size"],
        "rms_norm_eps": WIDE["norm_eps"],
        "rope_theta": WIDE["rope_base"],
        "max_position_embeddings": WIDE["max_seq_len"],
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    half = len(TEXT) // 2
    (folder / "scored.txt").write_text(TEXT[:half], encoding="utf-8")
    (folder / "other.txt").write_text(TEXT[half:], encoding="utf-8")
    return folder


def tiny_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the folder under torchtune's names."""
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(folder)}
    return dict(load_state_dict(section | {"model_type": "LLAMA3_2"}).state_dict)


def write(path: Path, folder: Path, scheme: str) -> Path:
    keys = {"model": {"_component_": "torchtune.models.llama3_2.llama3_2", **WIDE}, "dtype": "bf16"}
    if scheme == "awq":
        dataset = {"_component_": "ppl_eval.data.text_files", "paths": [str(folder / "other.txt")]}
        quantizer = {"_component_": "ppl_eval.quantization.awq", "groupsize": 64, "num_steps": 4}
        keys["quantizer"] = quantizer | {"calibration": {"dataset": dataset, "num_windows": 2}}
    return write_config(path, folder, folder / "scored.txt", **keys)


def test_same_bits_on_1_2_3_processes_and_from_a_saved_checkpoint(wide, tmp_path, private_home):
    plain, awq = (write(tmp_path / f"{name}.yaml", wide, name) for name in ("plain", "awq"))
    calls = {
        name: ["--config", str(awq if name == "awq" else plain), "max_windows=11", *arguments]
        for name, arguments in SCHEMES.items()
    }
    bits = {}
    saved = {}
    for name, call in calls.items():
        cli.main(["quantize", "--config", call[1], *call[2:], f"output_dir={tmp_path / 'saved' / name}"])
        (saved[name],) = (tmp_path / "saved" / name).glob("*.pt")
    for num_processes in (1, 2, 3):
        argvs = [
            [*call, f"output_dir={tmp_path / f'{num_processes}_{name}'}"] for name, call in calls.items()
        ]
        if num_processes == 2:
            argvs += [
                [
                    *("--config", str(plain), "max_windows=11", f"output_dir={tmp_path / f'saved_{name}'}"),
                    "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
                    f"checkpointer.checkpoint_dir={path.parent}",
                    f"checkpointer.checkpoint_files=[{path.name}]",
                ]
                for name, path in saved.items()
            ]
        finished = many(num_processes, argvs, tmp_path)
        assert finished.code == 0, finished.output
        for name in SCHEMES:
            result = result_of(tmp_path / f"{num_processes}_{name}")
            bits.setdefault(name, []).append(result["nll_sum_hex"])
            assert result["quantizer"]["num_quantized"] == 7
    for name in SCHEMES:
        bits[name].append(result_of(tmp_path / f"saved_{name}")["nll_sum_hex"])
        assert len(set(bits[name])) == 1, (name, bits[name])
    assert len({found[0] for found in bits.values()}) == len(SCHEMES)
    notes = result_of(tmp_path / "3_awq")["notes"]
    assert any("7 layers calibrated on 126 tokens, 4 exponents tried" in note for note in notes)
    report = json.loads(saved["int4_32"].with_suffix(".json").read_text())
    assert len(report["quantized"]) == 7
    assert (saved["int4_32"].parent / "tokenizer.json").is_file()
    assert not list(saved["int4_32"].parent.glob(".*half"))


def test_paired_with_full_precision_and_the_seed_of_a_training_run_on_two_ranks(wide, tmp_path, private_home):
    config = write(tmp_path / "plain.yaml", wide, "plain")
    trained = tmp_path / "trained"
    (trained / "epoch_0").mkdir(parents=True)
    (trained / "recipe_state").mkdir()
    torch.save(tiny_weights(wide), trained / "epoch_0" / "model-00001-of-00001.bin")
    state = {"seed": 7, "epochs_run": 1, "total_epochs": 3, "max_steps_per_epoch": None, "optimizer": {}}
    torch.save(state, trained / "recipe_state" / "recipe_state.pt")
    call = ["--config", str(config), "max_windows=11", "per_window=true"]
    checkpoint = [
        "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
        f"checkpointer.checkpoint_dir={trained}",
        "checkpointer.checkpoint_files=null",
    ]
    full = f"{tmp_path / 'full'}"
    argvs = [
        [*call, f"output_dir={full}"],
        [*call, *SCHEMES["int4_32"], f"output_dir={tmp_path / 'int4'}", f"baseline={full}/result.json"],
        [*call, *checkpoint, f"output_dir={tmp_path / 'trained_warn'}"],
        [*call, *checkpoint, "seed_check=ignore", f"output_dir={tmp_path / 'trained_ignore'}"],
    ]
    finished = many(2, argvs, tmp_path)
    assert finished.code == 0, finished.output
    assert "compared, not gated" in finished.output
    assert "paired over 11 windows" in finished.output
    found, baseline = result_of(tmp_path / "int4"), result_of(tmp_path / "full")
    against = found["against_baseline"]
    assert against["perplexity_ratio"] == pytest.approx(
        found["perplexity"] / baseline["perplexity"], rel=1e-12
    )
    assert 0 < against["ce_loss_difference_stderr"] < found["ce_loss"]
    warned, ignored = result_of(tmp_path / "trained_warn"), result_of(tmp_path / "trained_ignore")
    assert (warned["seed"], ignored["seed"]) == (7, 42)
    assert any("seed 7 of the checkpoint is used instead" in note for note in warned["notes"])
    assert warned["nll_sum_hex"] == ignored["nll_sum_hex"] == baseline["nll_sum_hex"]
    argv = [*call, *checkpoint, "seed_check=error", f"output_dir={tmp_path / 'refused'}"]
    finished = many(2, [argv], tmp_path)
    assert finished.code != 0
    assert finished.output.count("the checkpoint was trained with seed 7") == 1
    assert not (tmp_path / "refused" / "result.json").exists()


def test_calibration_mistakes_are_named(wide, tmp_path, private_home, capsys):
    config = write(tmp_path / "awq.yaml", wide, "awq")
    for change, told in (
        ("quantizer.calibration.num_windows=0", "num_windows is 0; it must be a whole number from 1"),
        ("quantizer.calibration.num_samples=3", "must have the keys dataset and num_windows"),
        ("~quantizer.calibration", "has no quantizer.calibration"),
        ("quantizer.calibration.dataset.paths=[nowhere.txt]", "nowhere.txt"),
    ):
        with pytest.raises(SystemExit) as e:
            cli.main(["quantize", "--config", str(config), change, f"output_dir={tmp_path / 'out'}"])
        assert e.value.code == 2
        assert told in capsys.readouterr().err
    cli.main(
        [
            *("quantize", "--config", str(config), f"output_dir={tmp_path / 'out'}"),
            f"quantizer.calibration.dataset.paths=[{wide / 'scored.txt'}]",
        ]
    )
    assert "calibrated on the very text that is scored" in capsys.readouterr().out
