"""One entry in the table is all that a new family takes: no other module is changed here."""

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchtune.models.llama3_2 import llama3_2

from helpers import tiny
from helpers import tiny_checkpoints as checkpoints
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.config import own_code
from ppl_eval.config.settings import read_settings
from ppl_eval.models import converters, families, hf_config
from ppl_eval.models.architectures import Architecture
from ppl_eval.models.config_check import check_config, model_section
from ppl_eval.models.families import Family
from ppl_eval.scoring.load import build_on_meta, match_family

# Our own builder of a Llama whose weight names have a prefix of their own.
MODULE = """
from torchtune.models.llama3_2 import llama3_2


def llamb(vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, max_seq_len, intermediate_dim,
          rope_base=10_000, norm_eps=1e-5):
    return llama3_2(
        vocab_size=vocab_size, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
        embed_dim=embed_dim, max_seq_len=max_seq_len, intermediate_dim=intermediate_dim,
        rope_base=rope_base, norm_eps=norm_eps, scale_factor=1,
    )
"""
BUILDER = "made_up.llamb.llamb"


def converter(tensors, layout):
    return converters.llama({name.removeprefix("llamb."): t for name, t in tensors.items()}, layout)


def triple_base(model, builder, facts):
    """A correction that needs a fact of config.json."""
    for layer in model.layers:
        layer.attn.pos_embeddings.base = facts["rope_theta"]
    return [f"llamb: RoPE base {facts['rope_theta']:g}"]


@pytest.fixture
def llamb(tmp_path, monkeypatch):
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").touch()
    (tmp_path / "made_up" / "llamb.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    architecture = Architecture(
        "llamb",
        BUILDER,
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        other_facts=lambda config: {"rope_theta": 3 * hf_config.rope_theta(config)},
        gguf="llama",
    )
    family = Family("made_up.llamb", "LLAMB", architecture, converter, (triple_base,))
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, family))
    yield
    own_code.allow([])


def write(folder):
    """A checkpoint of the family, its section and the weights under torchtune's names."""
    weights = checkpoints.random_weights(checkpoints.tied, torch.float32)
    section = checkpoints.write_hf(folder, weights, model_type="llamb", rope_theta=2000.0)
    path = folder / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({f"llamb.{name}": t for name, t in load_file(path).items()}, path)
    return {**section, "model_type": "LLAMB"}, weights


def test_a_made_up_family_builds_converts_is_corrected_and_checked(llamb, tmp_path):
    section, weights = write(tmp_path / "checkpoint")
    checkpoint = load_state_dict(section)
    assert set(checkpoint.state_dict) == set(weights)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.state_dict[name], tensor)

    arguments = {**checkpoints.SIZES, "max_seq_len": 256, "intermediate_dim": checkpoints.HIDDEN}
    config = tiny.write_config(
        tmp_path / "config.yaml",
        tmp_path,
        tmp_path / "text",
        model={"_component_": BUILDER, **arguments},
        checkpointer=section,
    )
    settings = read_settings(["--config", str(config), "allow_components=made_up"])
    model = build_on_meta(settings, torch.float32)
    assert match_family(model, checkpoint, settings) == ("checked", ["llamb: RoPE base 6000"])

    model = build_on_meta(settings, torch.float32)  # not corrected
    (difference,) = check_config(model.module, BUILDER, checkpoint.hf_config, "LLAMB")
    assert (difference.key, difference.expected) == ("rope_theta", "6000.0")
    assert difference.remedy == "set model.rope_base=6000.0"


def test_its_section_and_names_appear_in_messages(llamb, tmp_path):
    section, _ = write(tmp_path)
    described = OmegaConf.create(
        model_section(json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 256})
    ).model
    assert described._component_ == BUILDER
    assert described.max_seq_len == 256
    assert "llamb" in families.supported()
    with pytest.raises(ValueError, match="LLAMA3_2, LLAMB, MISTRAL"):
        load_state_dict({**section, "model_type": "LLAMC"})
    with torch.device("meta"):
        model = llama3_2(**checkpoints.SIZES, max_seq_len=256, intermediate_dim=8, scale_factor=1)
    differences = check_config(model, BUILDER, None, "QWEN2")
    assert str(differences[0].expected) == "LLAMB"


def test_families_that_share_a_model_type_share_a_converter():
    for family in families.FAMILIES:
        assert families.family_of_model_type(family.model_type).converter is family.converter
