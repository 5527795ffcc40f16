"""What a GGUF file says of RoPE, windows and heads is checked; the right model has transformers' logits."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.mistral import mistral
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from helpers import tiny_checkpoints as tiny
from helpers.gguf_files import write_gguf
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.models.config_check import check_config, model_arguments
from ppl_eval.models.families import correct

F32 = gguf.GGMLQuantizationType.F32
SIZES = tiny.SIZES | {"max_seq_len": 256, "intermediate_dim": tiny.HIDDEN, "rope_base": 10_000}
# head_dim 16: wavelengths of 6 to 20,000 tokens, on both sides of Llama 3's bounds and between them.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}


def rope_factors(**changes):
    """rope_freqs.weight as transformers' own frequencies ask for."""
    config = transformers.LlamaConfig(
        hidden_size=tiny.DIM,
        num_attention_heads=tiny.HEADS,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3 | changes,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    return (plain / scaled).numpy().astype(np.float32)


def with_factors(factors):
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors)


@pytest.fixture
def weights():
    return tiny.random_weights(tiny.tied, torch.float32)


def opened(folder, weights, extra=lambda writer: None, model_type="LLAMA3_2", **options):
    write_gguf(folder / "m.gguf", tiny.to_hf(weights), F32, extra=extra, **options)
    section = {"_component_": tiny.HF, "checkpoint_dir": str(folder), "checkpoint_files": ["m.gguf"]}
    return load_state_dict(section | {"model_type": model_type})


def built(builder, checkpoint, **arguments):
    model = builder(**SIZES | arguments)
    path = f"torchtune.models.{builder.__name__}.{builder.__name__}"
    correct(model, path, checkpoint.hf_config)
    load_into(model, checkpoint.state_dict, dtype=torch.float32)
    return model, check_config(model, path, checkpoint.hf_config)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_are_llama3s_scaling(tmp_path, weights, factor):
    checkpoint = opened(tmp_path, weights, with_factors(rope_factors(factor=factor)))
    model, differences = built(llama3_2, checkpoint, scale_factor=int(factor))
    assert differences == []
    config = transformers.LlamaConfig(
        **tiny.HF_CONFIG,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3 | {"factor": factor},
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.load_state_dict(tiny.to_hf(weights), strict=False)
    reference.tie_weights()
    tokens_BT = torch.randint(0, tiny.VOCAB, (1, 200), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected, found = reference(tokens_BT).logits, model(tokens_BT)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        unscaled, (difference,) = built(llama3_2, checkpoint, scale_factor=1)
        assert not torch.allclose(unscaled(tokens_BT), expected, rtol=1e-3, atol=1e-3)
    assert difference.key == "rope_scaling"
    assert difference.remedy == f"set model.scale_factor={factor:g}"
    assert "m.gguf says {rope_type: llama3" in str(difference)
    assert model_arguments(checkpoint.hf_config)["scale_factor"] == factor


def test_factor_between_the_bounds_is_recovered(tmp_path, weights):
    # 10 frequencies fewer: the last wavelength is 2 pi 10000^(6/8) = 6,283, below 8,192.
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(7) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    from ppl_eval.checkpoints.gguf_config import llama3_scaling

    config = {"rope_theta": 10000.0 ** (7 / 8)}  # so that i / 7 of it is i / 8 of 10,000
    assert llama3_scaling(tmp_path, torch.from_numpy(factors), config)["factor"] == pytest.approx(8, rel=1e-5)


def test_factors_of_ones_are_no_scaling(tmp_path, weights):
    checkpoint = opened(tmp_path, weights, with_factors(np.ones(8, np.float32)))
    assert built(llama3_2, checkpoint, scale_factor=1)[1] == []


@pytest.mark.parametrize(
    "changes",
    [{"high_freq_factor": 8.0}, {"original_max_position_embeddings": 4096}, {"low_freq_factor": 2.0}],
)
def test_other_factors_are_refused(tmp_path, weights, changes):
    with pytest.raises(ValueError, match="not those of Llama 3's formula"):
        opened(tmp_path, weights, with_factors(rope_factors(factor=8.0, **changes)))


def scaling(**keys):
    def add(writer):
        for key, value in keys.items():
            add_value = writer.add_string if isinstance(value, str) else writer.add_float32
            add_value(f"llama.rope.{key.replace('__', '.')}", value)

    return add


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, "linear"),
        ({"scaling__factor": 4.0}, "linear"),
        ({"scale_linear": 4.0}, "linear"),
        ({"scaling__type": "yarn", "scaling__factor": 4.0}, "yarn"),
        ({"scaling__type": "longrope"}, "longrope"),
        ({"scaling__type": "linear", "scaling__factor": 1.0}, None),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),  # as llama.cpp reads it
    ],
)
def test_rope_scaling_keys(tmp_path, weights, keys, kind):
    if kind == "longrope":
        with pytest.raises(ValueError, match="LongRoPE"):
            opened(tmp_path, weights, scaling(**keys))
        return
    checkpoint = opened(tmp_path, weights, scaling(**keys))
    for factor in (1, 8):
        _, differences = built(llama3_2, checkpoint, scale_factor=factor)
        by_key = {difference.key: difference for difference in differences}
        if kind:
            assert f"m.gguf says {{rope_type: {kind}, factor: 4.0" in str(by_key["rope_scaling"])
            assert "whatever the section" in by_key["rope_scaling"].remedy
        else:
            assert ("rope_scaling" in by_key) == (factor == 8)


def test_scaling_twice_and_unknown_keys_are_refused(tmp_path, weights):
    def both(writer):
        with_factors(rope_factors(factor=8.0))(writer)
        scaling(scaling__type="yarn", scaling__factor=4.0)(writer)

    with pytest.raises(ValueError, match="scales RoPE twice"):
        opened(tmp_path, weights, both)
    with pytest.raises(ValueError, match=r"llama\.attention\.scale=0\.5, which may change the arithmetic"):
        opened(tmp_path, weights, lambda writer: writer.add_float32("llama.attention.scale", 0.5))
    with pytest.raises(ValueError, match="by LongRoPE, which no builder of its architecture computes"):
        opened(tmp_path, weights, lambda w: w.add_tensor("rope_factors_long.weight", np.ones(8, np.float32)))


def test_mistral_with_and_without_a_window(tmp_path, weights):
    untied = tiny.random_weights(tiny.untied, torch.float32)
    checkpoint = opened(tmp_path, untied, model_type="MISTRAL")
    model, differences = built(mistral, checkpoint)
    assert (differences, model.layers[0].attn.sliding_window) == ([], None)
    assert any("name no sliding window" in note for note in checkpoint.notes)
    checkpoint = opened(tmp_path, untied, lambda w: w.add_sliding_window(5), model_type="MISTRAL")
    model, differences = built(mistral, checkpoint)
    assert (differences, model.layers[0].attn.sliding_window) == ([], 5)
    # A config.json beside the file adds what llama.cpp does not store.
    beside = tiny.HF_CONFIG | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 7}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    checkpoint = opened(tmp_path, untied, model_type="MISTRAL")
    model, differences = built(mistral, checkpoint)
    assert (differences, model.layers[0].attn.sliding_window) == ([], 7)
    assert any("sliding_window=7 is config.json's" in note for note in checkpoint.notes)
    with pytest.raises(
        ValueError, match=r"sliding_window: m\.gguf says 5 in every layer, config\.json says 7"
    ):
        opened(tmp_path, untied, lambda w: w.add_sliding_window(5), model_type="MISTRAL")


def test_tied_and_untied_heads(tmp_path, weights):
    untied = opened(tmp_path, tiny.random_weights(tiny.untied, torch.float32))
    assert built(llama3_2, untied, scale_factor=1, tie_word_embeddings=False)[1] == []
    tied = opened(tmp_path, weights)
    assert built(llama3_2, tied, scale_factor=1)[1] == []
    assert untied.hf_config["tie_word_embeddings"] is False
    assert tied.hf_config["tie_word_embeddings"] is True


def test_config_json_beside_the_file_must_agree(tmp_path, weights):
    beside = tiny.HF_CONFIG | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    assert any("agree with the config.json" in note for note in opened(tmp_path, weights).notes)
    (tmp_path / "config.json").write_text(json.dumps(beside | {"rope_theta": 5e5}))
    with pytest.raises(ValueError, match=r"rope_theta: m\.gguf says 10000\.0, config\.json says 500000\.0"):
        opened(tmp_path, weights)
