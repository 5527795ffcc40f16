"""`ppl-eval run`, `--version`, completion, and the help of the recipe."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest
import transformers

import distributed_ppl_eval
from helpers.family_models import SIZES
from helpers.models import write_random
from helpers.tiny import VOCAB_SIZE, write_config, write_tokenizer
from ppl_eval import evaluate
from ppl_eval.commands import cli
from ppl_eval.commands.run import config_of
from ppl_eval.config.settings import KEYS


def test_a_folder_and_a_text_give_the_number_of_a_config(tiny, tmp_path, capsys):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=5)
    expected = evaluate(config)
    cli.main(
        ["run", str(tiny.folder), str(tiny.text), "max_windows=5", "protocol.max_seq_len=64", "batch_size=2"]
    )
    shown = capsys.readouterr()
    assert shown.out == f"{expected!r}\n"
    assert "note: max_windows: only the first 5" in shown.err
    cli.main(["run", str(config), "~max_windows", "max_windows=5", "--table"])
    assert expected["nll_sum_hex"] in capsys.readouterr().out


def test_a_model_that_torchtune_does_not_build_is_scored(tiny, tmp_path, capsys):
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 80}
    write_random(transformers.Qwen3Config(**sizes, head_dim=16), tmp_path)
    write_tokenizer(tmp_path)
    cli.main(["run", str(tmp_path), str(tiny.text), "max_windows=2"])
    # Windows are what the model allows.
    assert f"over {2 * 79} tokens" in capsys.readouterr().out


def test_windows_are_no_longer_than_the_model_allows(tiny):
    longest = json.loads((tiny.folder / "config.json").read_text())["max_position_embeddings"]
    made = config_of(tiny.folder, [str(tiny.text)])
    assert made["protocol"]["max_seq_len"] == longest < 2048
    assert made["model"]["_component_"].startswith("torchtune.")


def test_what_is_missing_is_said(tiny, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    half = tmp_path / "half"
    half.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.folder / file, half)
    for arguments, message in (
        ([str(tiny.folder)], "name the text"),
        ([str(empty), "x.txt"], "has no config.json"),
        ([str(half), "x.txt"], "no *.safetensors"),
        ([str(tiny.folder), str(tmp_path / "none.txt")], "none.txt"),
        (["smollm2/135M_ppl", "x.txt"], "'x.txt'"),
        (["smollm2/135M_ppl", "batchsize=3"], "did you mean 'batch_size'"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["run", *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_version_and_completion(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ppl-eval {version('distributed_ppl_eval')}\n"
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    ask = "COMP_WORDS=(ppl-eval la); COMP_CWORD=1; _shtab_ppl_eval; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["launch"]


@pytest.mark.parametrize("argv", [["--help"], ["--config", "smollm2/135M_ppl", "-h"]])
def test_the_recipe_helps(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distributed_ppl_eval", *argv])
    monkeypatch.setattr(sys, "path", list(sys.path))
    distributed_ppl_eval.main()
    shown = capsys.readouterr().out
    assert "tune run distributed_ppl_eval --config" in shown
    assert set(KEYS) <= set(shown.replace(",", " ").replace(".", " ").split())
