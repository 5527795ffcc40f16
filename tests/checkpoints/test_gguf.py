"""GGUF files give the same model as the Hugging Face form that they were made from."""

import gguf
import numpy as np
import pytest
import torch

from helpers import tiny_checkpoints as tiny
from helpers.gguf_files import write_gguf
from helpers.models import on_meta
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict


@pytest.fixture
def section(tmp_path):
    section = {"_component_": tiny.HF, "checkpoint_dir": str(tmp_path), "checkpoint_files": ["m.gguf"]}
    return section | {"model_type": "LLAMA3_2"}


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0", "Q4_1"])
def test_gguf_equals_the_hf_form_of_the_same_numbers(tmp_path, section, kind):
    weights = tiny.random_weights(tiny.tied)
    kind = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "m.gguf", tiny.to_hf(weights), kind)
    # What the quantised blocks hold: rows are quantised one by one, so their order does not matter.
    rounded = {
        name: (
            w
            if w.ndim == 1
            else torch.from_numpy(
                gguf.quants.dequantize(gguf.quants.quantize(w.float().numpy(), kind), kind).copy()
            )
        )
        for name, w in weights.items()
    }
    opened = load_state_dict(section)
    model = on_meta(tiny.tied)
    load_into(model, opened.state_dict, dtype=torch.float32)
    expected = tiny.reference(tiny.tied, {name: w.float() for name, w in rounded.items()})
    assert torch.equal(tiny.logits(model), tiny.logits(expected))
    assert opened.hf_config["num_key_value_heads"] == tiny.KV_HEADS
    assert opened.hf_config["rms_norm_eps"] == 1e-5
    assert any("dequantised from GGUF" in note for note in opened.notes)


def test_unsuitable_gguf_is_refused(tmp_path, section):
    path = tmp_path / "m.gguf"
    hf = tiny.to_hf(tiny.random_weights(tiny.tied))
    write_gguf(path, hf, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="model_type can be LLAMA2"):
        load_state_dict(section | {"model_type": "GEMMA"})
    end = len(whole.rstrip(b"\0"))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"truncated: expected (\d+) bytes, found (\d+)") as e:
        load_state_dict(section)
    expected, found = (int(word.rstrip(",;")) for word in str(e.value).split() if word.rstrip(",;").isdigit())
    assert found == len(whole) // 2
    assert end <= expected <= len(whole)
    path.write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"\(40 bytes\) is truncated or corrupt"):
        load_state_dict(section)
    path.write_bytes(b"nonsense" * 20)
    with pytest.raises(ValueError, match=r"m\.gguf \(160 bytes\) is truncated or corrupt"):
        load_state_dict(section)
    write_gguf(path, hf, gguf.GGMLQuantizationType.Q8_0, architecture="falcon")
    with pytest.raises(
        ValueError, match=r"architecture 'falcon'; of GGUF files those of gemma, gemma2, .*llama"
    ):
        load_state_dict(section)
    path.unlink()
    extra = lambda writer: writer.add_tensor("odd", np.zeros(32, np.int8))  # noqa: E731
    write_gguf(path, hf, gguf.GGMLQuantizationType.Q8_0, extra=extra)
    with pytest.raises(ValueError, match="odd holds I8 blocks, which the package gguf cannot dequantise"):
        load_state_dict(section)
