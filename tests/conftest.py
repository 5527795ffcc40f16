"""Fixtures: the demo model where it was fetched, and a tiny random model made on the spot."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Nothing here may reach for a hub; a test that does fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True)
class TinyModel:
    """A tiny model on disk, its transformers twin in memory, and a text."""

    folder: Path
    text: Path
    twin: Any


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    from helpers.tiny import TEXT, write_model, write_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    twin = write_model(folder)
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return TinyModel(folder, text, twin)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the demo model."""
    from ppl_eval.commands.demo_model import model_folder

    folder = model_folder("smollm2-135m")
    if not folder.is_dir():
        pytest.fail("the demo model is not there; `make model` fetches it")
    return folder


@pytest.fixture
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that nothing is found that an earlier run left."""
    home = tmp_path / "home"
    monkeypatch.setenv("PPL_EVAL_HOME", str(home))
    return home
