"""config.json against the built model: differences found, named and mended; the rest refused."""

import json

import numpy as np
import pytest
import torch
import transformers
from torchtune.config._utils import _get_component_from_path

from helpers.family_models import (
    BUILDERS,
    CASES,
    LLAMA3_ROPE,
    LONG,
    build,
    checkpoint,
    torchtune_nll,
    transformers_nll,
)
from helpers.published import PUBLISHED, SMOLLM2
from ppl_eval.models import hf_config
from ppl_eval.models.config_check import check_config, model_arguments, verify
from ppl_eval.models.families import architecture_of, correct

BY_NAME = {case.name: case for case in CASES}
LLAMA3_8B = "torchtune.models.llama3.llama3_8b"


def on_meta(builder, **arguments):
    with torch.device("meta"):
        return _get_component_from_path(builder)(**arguments)


def config_of(builder):
    return dict(PUBLISHED[builder.removeprefix("torchtune.models.")].config)


@pytest.mark.parametrize(
    ("name", "changed", "key", "remedy"),
    [
        ("llama2", {"rope_base": 500_000}, "rope_theta", "set model.rope_base=10000.0"),
        ("llama2", {"norm_eps": 0.1}, "rms_norm_eps", "set model.norm_eps=1e-05"),
        ("llama3_1", {"scale_factor": 1}, "rope_scaling", "set model.scale_factor=8"),
        ("llama3_2", {"scale_factor": 8}, "rope_scaling", "set model.scale_factor=32"),
        ("smollm2", {"scale_factor": 32}, "rope_scaling", "set model.scale_factor=1"),
        ("mistral", {"rope_base": 1e6}, "rope_theta", "set model.rope_base=10000.0"),
        ("gemma", {"norm_eps": 0.1}, "rms_norm_eps", "set model.norm_eps=1e-06"),
        (
            "gemma2",
            {"query_pre_attn_scalar": None},
            "query_pre_attn_scalar",
            "set model.query_pre_attn_scalar=24",
        ),
        ("gemma2", {"sliding_window_size": 8}, "sliding_window", "set model.sliding_window_size=16"),
        (
            "gemma2",
            {"hidden_capping_value": 50.0},
            "attn_logit_softcapping",
            "set model.hidden_capping_value=5.0",
        ),
        (
            "gemma2",
            {"final_capping_value": 30.0},
            "final_logit_softcapping",
            "set model.final_capping_value=7.0",
        ),
        ("phi4", {"rope_base": 10_000}, "rope_theta", "set model.rope_base=250000.0"),
        ("qwen2", {"rope_base": 1e4}, "rope_theta", "set model.rope_base=1000000.0"),
    ],
)
def test_a_wrong_constant_is_found_and_matters(name, changed, key, remedy):
    case = BY_NAME[name]
    folder = checkpoint(case.name)
    model, config, _ = build(case, folder, **changed)
    (difference,) = check_config(model, BUILDERS[case.family], config)
    assert (difference.key, difference.remedy) == (key, remedy)
    error = np.abs(
        torchtune_nll(model, LONG, torch.float32) - transformers_nll(folder, LONG, torch.float32)
    ).max()
    print(f"\n{name} with {changed}: a token's NLL off by up to {error:.2g} nats")
    assert error > 1e-2


def test_every_size_is_compared():
    config = config_of("torchtune.models.llama3_2.llama3_2_1b")
    wrong = {
        "vocab_size": 128_000,
        "num_layers": 15,
        "num_heads": 16,
        "num_kv_heads": 4,
        "embed_dim": 1024,
        "intermediate_dim": 4096,
        "tie_word_embeddings": False,
    }
    arguments = model_arguments(config)
    component = arguments.pop("_component_")
    differences = check_config(on_meta(component, **arguments | wrong), component, config)
    assert {difference.remedy.removeprefix("set model.").split("=")[0] for difference in differences} >= set(
        wrong
    )


def test_llama3_1_checkpoint_in_the_llama3_builder_is_an_error_with_a_section_that_mends_it():
    config = config_of("torchtune.models.llama3_1.llama3_1_8b")
    with pytest.raises(ValueError, match=r"rope_scaling: config\.json says") as error:
        verify(on_meta(LLAMA3_8B), LLAMA3_8B, config)
    section = str(error.value).split("model:\n")[-1].split("\nSet config_check")[0]
    arguments = {k: json.loads(v) if v[0] not in "tTF" else v for k, v in _lines(section)}
    component = arguments.pop("_component_")
    arguments["tie_word_embeddings"] = False
    model = on_meta(component, **arguments)
    assert verify(model, component, config) == ("checked", [])


def _lines(section):
    return [line.strip().split(": ", 1) for line in section.splitlines()]


@pytest.mark.parametrize("builder", PUBLISHED)
def test_the_suggested_section_builds_what_config_json_says(builder):
    config = config_of(builder)
    arguments = model_arguments(config)
    component = arguments.pop("_component_")
    model = on_meta(component, **arguments)
    correct(model, component, config)
    assert check_config(model, component, config) == []


def test_smollm2_is_llama3_2_without_scaling():
    arguments = model_arguments(SMOLLM2.config)
    component = arguments.pop("_component_")
    model = on_meta(component, **arguments)
    assert arguments["scale_factor"] == 1
    assert sum(parameter.numel() for parameter in model.parameters()) == SMOLLM2.num_parameters
    assert check_config(model, component, SMOLLM2.config) == []


def test_a_checkpoint_of_another_architecture_is_a_difference():
    (difference,) = check_config(on_meta(LLAMA3_8B), LLAMA3_8B, config_of("torchtune.models.qwen2.qwen2_7b"))
    assert difference.key == "model_type"
    assert "torchtune.models.qwen2.qwen2" in difference.remedy


def test_the_checkpointers_model_type_must_fit_the_builder():
    (difference,) = check_config(on_meta(LLAMA3_8B), LLAMA3_8B, None, model_type="QWEN2")
    assert difference.remedy == "checkpointer.model_type=LLAMA3"
    assert f"model._component_={LLAMA3_8B} says LLAMA3, the checkpointer section has QWEN2" in str(difference)
    assert check_config(on_meta(LLAMA3_8B), LLAMA3_8B, None, model_type="LLAMA2") == []  # the same converter


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_moe", "gemma3", "mixtral", None])
def test_newer_architectures_are_refused_with_what_is_supported(model_type):
    config = config_of(LLAMA3_8B) | {"model_type": model_type}
    for call in (correct, check_config):
        with pytest.raises(ValueError, match=r"cannot build; supported are .*llama3_3.*qwen2_5"):
            call(on_meta(LLAMA3_8B), LLAMA3_8B, config)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "gives no probability of a next token"),
    ],
)
def test_checkpoints_that_are_no_plain_language_model_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        correct(on_meta(LLAMA3_8B), LLAMA3_8B, config_of(LLAMA3_8B) | extra)


def test_swish_is_silu():
    config = config_of(LLAMA3_8B)
    assert check_config(on_meta(LLAMA3_8B), LLAMA3_8B, config | {"hidden_act": "swish"}) == []
    swish, silu = (transformers.activations.ACT2FN[name] for name in ("swish", "silu"))
    x = torch.linspace(-9, 9, 99)
    assert torch.equal(swish(x), silu(x))


@pytest.mark.parametrize("prefix", ["lora", "qlora"])
def test_builders_with_lora_layers_are_refused_with_the_plain_one(prefix):
    with pytest.raises(ValueError, match=r"=torchtune\.models\.llama3\.llama3_8b without the lora_"):
        correct(on_meta(LLAMA3_8B), f"torchtune.models.llama3.{prefix}_llama3_8b", None)


@pytest.mark.parametrize(
    ("scaling", "why"),
    [
        ({"type": "linear", "factor": 4.0}, "rope_type: linear, factor: 4.0"),
        (
            {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 2.0}
            | {"original_max_position_embeddings": 4096},
            "rope_type: longrope",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings: 4096",
        ),
    ],
)
def test_scaling_that_no_builder_has_is_not_answered_with_a_section(scaling, why):
    config = config_of(LLAMA3_8B) | {"rope_scaling": scaling}
    (difference,) = check_config(on_meta(LLAMA3_8B), LLAMA3_8B, config)
    assert why in difference.remedy
    assert "whatever the section" in difference.remedy
    assert "model:" not in difference.remedy


def test_builders_of_no_family_are_refused():
    with pytest.raises(ValueError, match="of no family that can be scored; supported are"):
        correct(on_meta(LLAMA3_8B), "torchtune.models.clip.clip_vision_encoder", None)


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
        ({"attention_bias": True}, "query, key and value bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 64}, "head_dim"),
        ({"partial_rotary_factor": 0.5}, "rotary_dim"),
    ],
)
def test_what_torchtune_cannot_express_is_a_difference(extra, key):
    differences = check_config(on_meta(LLAMA3_8B), LLAMA3_8B, config_of(LLAMA3_8B) | extra)
    assert key in {difference.key for difference in differences}
    assert "torchtune 0.6.1 cannot build" in differences[0].remedy


def test_both_spellings_of_rope_mean_the_same():
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"} | {"factor": 8.0}
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    new = {"model_type": "llama", "rope_parameters": LLAMA3_ROPE | {"factor": 8.0}}
    older = {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [2]}}
    assert hf_config.rope_theta(old) == hf_config.rope_theta(new) == 5e5
    assert hf_config.rope_scaling(old) == hf_config.rope_scaling(new)
    sizes = {"max_position_embeddings": 131_072, "hidden_size": 64, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 3, "intermediate_size": 4}
    assert architecture_of(older).facts(older | sizes)["rope_scaling"]["rope_type"] == "longrope"
    assert hf_config.rope_scaling({"rope_scaling": None, "rope_theta": 1e4}) == {"rope_type": "default"}


def test_a_config_json_without_a_size_is_named():
    config = config_of(LLAMA3_8B)
    del config["intermediate_size"]
    with pytest.raises(ValueError, match=r"config\.json has no 'intermediate_size'"):
        check_config(on_meta(LLAMA3_8B), LLAMA3_8B, config)


def test_modes_of_enforcement():
    config, model = config_of(LLAMA3_8B) | {"rope_theta": 1e4}, on_meta(LLAMA3_8B)
    line = "rope_theta: config.json says 10000.0, the model has 500000.0; "
    with pytest.raises(ValueError, match="rope_theta") as error:
        verify(model, LLAMA3_8B, config, "error")
    assert line in str(error.value)
    verdict, (note,) = verify(model, LLAMA3_8B, config, "warn")
    assert verdict == "differs"
    assert note.startswith(f"config_check: {line}")


def test_verdicts():
    good, model = config_of(LLAMA3_8B), on_meta(LLAMA3_8B)
    assert verify(model, LLAMA3_8B, good) == ("checked", [])
    assert verify(model, LLAMA3_8B, None)[0] == "unchecked"
    assert verify(model, LLAMA3_8B, good | {"rope_theta": 1.0}, "warn")[0] == "differs"
    assert verify(model, LLAMA3_8B, good | {"rope_theta": 1.0}, "off")[0] == "off"
