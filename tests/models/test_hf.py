"""transformers' models through the second engine, against transformers' own full forward."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from helpers.hf_models import CASES, loaded, section, written
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.models.decoder import Asked
from ppl_eval.models.hf import causal_lm
from ppl_eval.quantization.quantize import quantize
from ppl_eval.scoring.nll import ScoringModel

TOKENS_BT = torch.randint(3, 160, (2, 41), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def full_forward(model):
    logits_BTV = model(TOKENS_BT[:, :-1]).logits.double()
    return -torch.log_softmax(logits_BTV, -1).gather(-1, TOKENS_BT[:, 1:, None]).flatten()


@torch.no_grad()
def scored(decoder):
    model = ScoringModel(decoder, max_logits_bytes=2**14)
    return model(TOKENS_BT[:, :-1].contiguous(), TOKENS_BT[:, 1:].contiguous())[0].double()


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_nll_of_transformers_own_forward(name, tmp_path, capsys):
    _, attention = written(name, tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    found_N = scored(loaded(tmp_path, attention))
    difference = float((found_N - full_forward(own)).abs().max())
    with capsys.disabled():
        print(f"\n  {name} ({type(own).__name__}, {attention}): largest token difference {difference:.1e}")
    assert difference < 1e-5 * max(1.0, float(found_N.max()))


def test_a_head_that_does_more_than_is_known_is_refused(tmp_path, monkeypatch):
    from ppl_eval.models import hf_decoder

    written("granite", tmp_path)
    monkeypatch.delitem(hf_decoder._FACTORS, "granite")
    with pytest.raises(ValueError, match="does something to its logits that is not known here"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "mamba2", "deepseek_v3"])
def test_in_bfloat16_every_tensor_has_the_dtype_that_transformers_gives_it(name, tmp_path):
    _, attention = written(name, tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=attention, dtype=torch.bfloat16
    ).eval()
    decoder = loaded(tmp_path, attention, torch.bfloat16)
    for kind in ("named_parameters", "named_buffers"):
        theirs = {part: tensor.dtype for part, tensor in getattr(own, kind)()}
        for part, tensor in getattr(decoder.module, kind)():
            assert tensor.dtype == theirs[part], part
    torch.testing.assert_close(scored(decoder), full_forward(own), rtol=0, atol=0.05)


def test_joined_experts_count_as_not_quantised(tmp_path):
    written("mixtral", tmp_path)
    decoder = loaded(tmp_path)
    report = quantize(decoder, {"_component_": "torchao.quantization.Int8WeightOnlyConfig"}, "cpu")
    parts = ("gate_up_proj", "down_proj")
    experts = {f"model.layers.{n}.mlp.experts.{part}" for n in (0, 1) for part in parts}
    assert experts <= {name for name, _ in report.skipped}
    # The routers' matrices are no linear layers either.
    (note,) = (note for note in report.notes if "no linear layer" in note)
    assert note.endswith(f": {len(report.skipped)} layers")


def test_an_adapter_is_to_be_merged_first(tmp_path):
    written("llama", tmp_path)
    (tmp_path / "adapter_model.pt").touch()
    with pytest.raises(ValueError, match="merge the"):
        load_state_dict(section(tmp_path) | {"adapter_checkpoint": "adapter_model.pt"})


def test_tensors_that_have_no_place_are_refused(tmp_path):
    model, _ = written("mixtral", tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({**state, "model.layers.0.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.layers\.0\.extra\.weight"):
        loaded(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w')")
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    with pytest.raises(ValueError, match="transformers does not know the model"):
        causal_lm(str(tmp_path))
    assert not mark.exists()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config"):
        causal_lm(str(tmp_path))
    written("llama", tmp_path)
    with torch.device("meta"):
        decoder = causal_lm(str(tmp_path))
    with pytest.raises(ValueError, match="model_type=TRANSFORMERS"):
        decoder.check({"model_type": "llama"}, Asked("", model_type="LLAMA3"))
    own = json.loads((tmp_path / "config.json").read_text())
    asked = Asked("", model_type="TRANSFORMERS")
    assert decoder.check(own, asked) == ("checked", [])
    for beside, shown in (
        (own | {"rope_theta": 5.0}, r"differ in 1 keys \(rope_theta None and 5\.0\): the weights belong"),
        (own | {"num_hidden_layers": 3}, r"num_hidden_layers 2 and 3"),
        ({key: own[key] for key in own if key != "hidden_act"}, r"hidden_act silu and None"),
        (None, "no config.json to hold"),
    ):
        with pytest.raises(ValueError, match=shown):
            decoder.check(beside, asked)
    assert "not available for ppl_eval.models.hf" in decoder.supports("tensor_parallel_plan")
