"""The tokenizer section of a model's folder."""

import json

import pytest

from helpers.tiny import write_tokenizer
from ppl_eval.tokenization.folder import tokenizer_section
from ppl_eval.tokenization.tokenizer import without_bos, wrap_tokenizer


def test_bos_and_eos_come_from_what_is_there(tmp_path):
    write_tokenizer(tmp_path)
    named = {"_component_", "tokenizer_json_path", "tokenizer_config_json_path"}
    assert tokenizer_section(tmp_path).keys() == named
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer_config\.json, which says what BOS and EOS are"):
        tokenizer_section(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 2]}))
    section = tokenizer_section(tmp_path)
    tokenizer = without_bos(section)
    assert tokenizer is not None
    encoder = wrap_tokenizer(tokenizer, section)
    assert (encoder.bos_id, encoder.eos_id) == (0, 1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tekken.json", "tekken.json is Mistral's tekken form"),
        ("tokenizer.model", r"tokenizer.model is a SentencePiece .*save_pretrained"),
        ("spiece.model", "spiece.model is a SentencePiece"),
        ("vocab.json", "vocab.json is a vocabulary"),
        ("other.txt", r"has no tokenizer\.json\. A tokenizer of another form"),
    ],
)
def test_another_form_is_named(tmp_path, name, hint):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=hint):
        tokenizer_section(tmp_path)
