"""config.json is read as transformers 5 reads it, or refused: live against its config classes."""

import copy

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from ppl_eval.models import families

ARCHITECTURES = {family.architecture.model_type: family.architecture for family in families.FAMILIES}
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
KEYS = (
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta"),
    *("sliding_window", "rope_parameters", "rope_scaling", "partial_rotary_factor", "layer_types"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "use_sliding_window"),
    *("original_max_position_embeddings", "max_window_layers"),
)


def by_transformers(model_type, config):
    """The facts that transformers' own config object holds, or None where it refuses the file."""
    try:
        read = transformers.AutoConfig.for_model(model_type, **config)
    except StrictDataclassError:
        return None
    # Gemma 3 has those of the layers with a window beside them.
    rope = read.rope_parameters.get("full_attention", read.rope_parameters)
    if rope["rope_theta"] is None:  # it loads and fails when the frequencies are computed
        return None
    facts = {
        "num_key_value_heads": read.num_key_value_heads,
        "head_dim": getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
        "rms_norm_eps": read.rms_norm_eps,
        "tie_word_embeddings": read.tie_word_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"rope_type": rope["rope_type"]},
    }
    if rope["rope_type"] == "llama3":
        read.standardize_rope_params()  # as computing the frequencies does
        facts["rope_scaling"] = {key: rope[key] for key in LLAMA3}
    return facts


def check(model_type, config, *, may_refuse=False):
    """Assert that both read the same, and return whether ours refuses."""
    expected = by_transformers(model_type, copy.deepcopy(config))  # it writes into the nested ones
    try:
        found = ARCHITECTURES[model_type].facts(config)
    except ValueError:
        assert may_refuse or expected is None, f"transformers reads {expected}"
        return True
    assert expected is not None, "transformers refuses it"
    assert {key: found[key] for key in expected} == expected
    return False


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("key", [None, *KEYS])
def test_absent_and_null_keys(model_type, key):
    # Only Phi-3 refuses this one; a null says nothing that a missing key does not.
    # Layers of Gemma 3 with a RoPE base of their own and no window are not built.
    refused = key == "partial_rotary_factor" or (model_type, key) == ("gemma3_text", "sliding_window")
    check(model_type, SIZES | ({} if key is None else {key: None}), may_refuse=refused)


SAME = {
    "theta twice": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "both spellings": {
        "rope_scaling": LLAMA3,
        "rope_parameters": LLAMA3 | {"rope_theta": 1e4},
        "rope_theta": 1e4,
    },
    "type twice": {"rope_scaling": LLAMA3 | {"type": "llama3"}},
    "theta inside only": {"rope_scaling": LLAMA3 | {"rope_theta": 5e5}},
    "original length beside": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("original")},
        "original_max_position_embeddings": 64,
    },
    "original length nowhere": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    },
    "head_dim is not hidden / heads": {"head_dim": 32},
}
CONFLICTS = {
    "rope_theta inside .* 500000.0 and rope_theta beside them 10000.0": {
        "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    r"RoPE twice, differently: rope_parameters .*default.* and rope_scaling .*llama3": {
        "rope_scaling": LLAMA3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "RoPE twice, differently: .*500000": {
        "rope_theta": 1e4,
        "rope_scaling": LLAMA3,
        "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
    },
    "rope_type 'llama3' and type 'linear'": {"rope_scaling": LLAMA3 | {"type": "linear"}},
    "original_max_position_embeddings inside .* 32 and .* beside them 64": {
        "rope_scaling": LLAMA3,
        "original_max_position_embeddings": 64,
    },
    "only one set of RoPE parameters for all layers": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}}
    },
}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("case", SAME)
def test_one_fact_in_two_places(model_type, case):
    assert not check(model_type, SIZES | {"num_key_value_heads": 2} | SAME[case])


@pytest.mark.parametrize("message", CONFLICTS)
def test_a_contradiction_is_refused_with_both_values(message):
    with pytest.raises(ValueError, match=message):
        ARCHITECTURES["llama"].facts(SIZES | CONFLICTS[message])
