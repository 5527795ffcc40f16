"""Tokenizers as the recipe sees them."""

import json
from pathlib import Path

import pytest
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from helpers.tiny_tokenizers import hard_bpe, write_folder
from ppl_eval.tokenization.tokenizer import without_bos, wrap_tokenizer

COMPONENT = "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer"


@pytest.mark.parametrize("bos", [{"bos_token": None}, {}, {"bos_token": None, "add_bos_token": True}])
def test_a_tokenizer_without_bos_is_read(tmp_path: Path, bos: dict[str, bool | None]) -> None:
    section = write_folder(hard_bpe("byte_level"), tmp_path, "<|endoftext|>") | {"_component_": COMPONENT}
    assert without_bos(section) is None
    about = {"eos_token": {"content": "<|endoftext|>"}, **bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    arguments = {key: value for key, value in section.items() if key != "_component_"}
    with pytest.raises(ValueError, match="Could not parse bos_token"):
        HuggingFaceBaseTokenizer(**arguments)
    encoder = wrap_tokenizer(without_bos(section), section)
    assert (encoder.bos_id, encoder.eos_id, encoder.adds_bos) == (None, 1, False)
    assert encoder.bos_tokens("tokenizer") == []
    assert encoder.decode(encoder.encode("the cat").tolist())
    assert encoder.folder == tmp_path


def test_eos_of_the_generation_config(tmp_path: Path) -> None:
    section = write_folder(hard_bpe("byte_level"), tmp_path, "<|endoftext|>") | {"_component_": COMPONENT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    section["generation_config_path"] = str(tmp_path / "generation_config.json")
    encoder = wrap_tokenizer(without_bos(section), section)
    assert (encoder.bos_id, encoder.eos_id) == (0, 1)
