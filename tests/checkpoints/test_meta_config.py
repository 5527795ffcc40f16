"""Meta's params.json is held against the built model as config.json is."""

import json

import pytest
import torch
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_1 import llama3_1_8b, llama3_1_70b
from torchtune.models.llama3_2 import llama3_2_1b, llama3_2_3b
from torchtune.models.mistral import mistral

from helpers import tiny_checkpoints as tiny
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.meta_config import meta_config
from ppl_eval.models.config_check import check_config
from ppl_eval.models.families import correct

LLAMA2 = "torchtune.models.llama2.llama2"
# 4 * 64 * 2/3 = 170 -> times 0.7 = 119 -> the next multiple of 64: 128
PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-5}
PARAMS |= {"multiple_of": 64, "ffn_dim_multiplier": 0.7}
# As Meta published them.
RELEASED = {
    llama3_1_8b: {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim_multiplier": 1.3, "multiple_of": 1024},
    llama3_1_70b: {
        "dim": 8192,
        "n_layers": 80,
        "n_heads": 64,
        "ffn_dim_multiplier": 1.3,
        "multiple_of": 4096,
    },
    llama3_2_1b: {"dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim_multiplier": 1.5, "multiple_of": 256},
    llama3_2_3b: {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim_multiplier": 1.0, "multiple_of": 256},
}
LLAMA3 = {
    "n_kv_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
    "vocab_size": 128256,
}


def differences(folder, params, beside=None):
    section = tiny.write_meta(folder, tiny.random_weights(tiny.untied))
    (folder / "params.json").write_text(json.dumps(params))
    if beside:
        (folder / "config.json").write_text(json.dumps(beside))
    checkpoint = load_state_dict(section)
    return {str(d).split(";")[0] for d in check_config(tiny.untied(), LLAMA2, checkpoint.hf_config, "LLAMA2")}


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, None),
        ({"rope_theta": 5e5}, "rope_theta: params.json says 500000.0, the model has 10000.0"),
        ({"norm_eps": 1e-6}, "rms_norm_eps: params.json says 1e-06, the model has 1e-05"),
        ({"n_kv_heads": None}, "num_key_value_heads: params.json says 4, the model has 2"),
        ({"n_layers": 3}, "num_hidden_layers: params.json says 3, the model has 2"),
        ({"vocab_size": 95}, "vocab_size: params.json says 95, the model has 96"),
        ({"ffn_dim_multiplier": 1.3}, "intermediate_size: params.json says 256, the model has 128"),
        ({"multiple_of": 256}, "intermediate_size: params.json says 256, the model has 128"),
        (
            {"use_scaled_rope": True, "rope_scaling_factor": 8},
            "rope_scaling: params.json says {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,"
            " high_freq_factor: 4.0, original_max_position_embeddings: 8192},"
            " the model has {rope_type: default}",
        ),
    ],
)
def test_a_constant_that_contradicts_the_model_is_found(tmp_path, changed, line):
    found = differences(tmp_path, PARAMS | changed)
    assert line in found if line else found == set()


def test_tied_and_untied_builders_are_both_right_for_metas_files(tmp_path):
    config = meta_config(write(tmp_path), model_type="LLAMA2", vocab_size=96, beside=None, notes=[])
    assert check_config(tiny.untied(), LLAMA2, config) == []
    with torch.device("meta"):
        wide = llama2(**tiny.SIZES | {"embed_dim": 128}, max_seq_len=256, intermediate_dim=tiny.HIDDEN)
    keys = {difference.key for difference in check_config(wide, LLAMA2, config)}
    assert "hidden_size" in keys


def write(folder, **params):
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    return folder


@pytest.mark.parametrize("builder", RELEASED, ids=lambda builder: builder.__name__)
def test_released_models_agree_with_their_builders(tmp_path, builder):
    write(tmp_path, **LLAMA3 | RELEASED[builder])
    config = meta_config(tmp_path, model_type="LLAMA3", vocab_size=128256, beside=None, notes=[])
    with torch.device("meta"):
        model = builder()
    path = f"torchtune.models.{builder.__module__.split('.')[2]}.{builder.__name__}"
    correct(model, path, config)
    assert check_config(model, path, config) == []


def test_what_is_unclear_or_contradicts_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"add rope_scaling_factor, 8 for Llama 3.1"):
        differences(tmp_path, PARAMS | {"use_scaled_rope": True})
    with pytest.raises(ValueError, match=r"'moe': \{\}.*may change the arithmetic"):
        differences(tmp_path, PARAMS | {"moe": {}})
    with pytest.raises(ValueError, match="holds a list"):
        differences(tmp_path, [])
    beside = tiny.HF_CONFIG | {"rms_norm_eps": 1e-5}
    assert differences(tmp_path, PARAMS, beside) == set()
    with pytest.raises(ValueError, match=r"rope_theta: params\.json says 10000\.0, config\.json says 5"):
        differences(tmp_path, PARAMS, beside | {"rope_theta": 5e5})


def test_mistrals_own_file(tmp_path):
    params = {key: PARAMS[key] for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps")}
    params |= {"head_dim": 16, "hidden_dim": 128, "sliding_window": 5, "vocab_size": 96}
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = meta_config(tmp_path, model_type="MISTRAL", vocab_size=96, beside=None, notes=[])
    model = mistral(**tiny.SIZES, max_seq_len=256, intermediate_dim=128)
    correct(model, "torchtune.models.mistral.mistral", config)
    assert check_config(model, "torchtune.models.mistral.mistral", config) == []
    assert model.layers[0].attn.sliding_window == 5
