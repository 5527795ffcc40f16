"""What a config leaves to the checkpoint's folder."""

import json

import pytest

from helpers.tiny import write_tokenizer
from ppl_eval.config.settings import read_settings
from ppl_eval.run.from_folder import filled


def settings_of(folder, *overrides):
    return read_settings(["--config", "hf/causal_lm", f"checkpointer.checkpoint_dir={folder}", *overrides])


@pytest.mark.parametrize(
    ("described", "dtype", "length"),
    [
        ({"torch_dtype": "bfloat16", "max_position_embeddings": 131072}, "bf16", 2048),
        ({"dtype": "float16", "torch_dtype": "float32", "n_positions": 1024}, "fp16", 1024),
        ({"text_config": {"dtype": "float32", "max_position_embeddings": 512}}, "fp32", 512),
        ({"dtype": "float32"}, "fp32", 2048),
    ],
)
def test_dtype_and_length_are_those_of_the_model(described, dtype, length, tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))
    found = filled(settings_of(tmp_path))
    assert (found.dtype, found.protocol.max_seq_len) == (dtype, length)
    assert found.as_dict()["tokenizer"]["tokenizer_json_path"] == str(tmp_path / "tokenizer.json")
    assert len(found.notes) == 2
    given = filled(settings_of(tmp_path, "dtype=fp32", "protocol.max_seq_len=17"))
    assert (given.dtype, given.protocol.max_seq_len, given.notes) == ("fp32", 17, ())


def test_what_the_folder_does_not_say_is_asked_for(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"dtype and protocol\.max_seq_len: null leaves it to config\.json"):
        filled(settings_of(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "int8"}))
    with pytest.raises(ValueError, match=r"config\.json, whose dtype is 'int8'; write one of bf16"):
        filled(settings_of(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        filled(settings_of(tmp_path / "absent"))
