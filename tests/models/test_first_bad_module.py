"""The module in which a NaN or an infinity enters, in decoders of both engines."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtune.models.llama3 import llama3
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.tiny import SHAPE
from ppl_eval.models.engines import scorable
from ppl_eval.models.first_bad_module import watching
from ppl_eval.models.hf_decoder import HFDecoder

TOKENS_BT = torch.arange(24).reshape(2, 12)
SIZES = {name: value for name, value in SHAPE.items() if name != "scale_factor"}


def torchtune_decoder():
    decoder = scorable(llama3(**SIZES).eval().requires_grad_(False))
    decoder.prepare(torch.device("cpu"))
    return decoder


def transformers_decoder():
    config = LlamaConfig(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return HFDecoder(LlamaForCausalLM(config).eval().requires_grad_(False), config.to_dict())


DECODERS = {"torchtune": torchtune_decoder, "transformers": transformers_decoder}


def fill(decoder):
    torch.manual_seed(0)
    for name, parameter in decoder.module.named_parameters():
        if "norm" in name or "scale" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, 0.1)
    decoder.stop_before_head()
    return dict(decoder.module.named_parameters())


def seen(decoder):
    with watching(decoder, tuple(TOKENS_BT.shape)) as watched:
        decoder.hidden(TOKENS_BT, None, TOKENS_BT.shape[1])
    return watched


@pytest.mark.parametrize(
    ("engine", "weight", "module"),
    [
        ("torchtune", "layers.1.mlp.w2.weight", "layers.1.mlp.w2 (OneDNNLinear)"),
        ("torchtune", "layers.0.attn.k_proj.weight", "layers.0.attn.k_proj (OneDNNLinear)"),
        ("torchtune", "norm.scale", "norm (RMSNorm)"),
        (
            "transformers",
            "model.layers.1.mlp.down_proj.weight",
            "model.layers.1.mlp.down_proj (OneDNNLinear)",
        ),
        ("transformers", "model.norm.weight", "model.norm (LlamaRMSNorm)"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_weight_is_named(engine, weight, module, value):
    decoder = DECODERS[engine]()
    decoder.prepare(torch.device("cpu"))
    weights = fill(decoder)
    assert seen(decoder).text == ""
    weights[weight].view(-1)[3] = value
    watched = seen(decoder)
    kind = weight.rpartition(".")[2]
    assert watched.text == f"{module}: its {kind} holds 1 values that are not finite"
    assert (watched.row, watched.column) == (0, 0)
    hooks = [module._forward_hooks for module in decoder.module.modules()]
    assert not any(hooks), "no cost is left behind"


@pytest.mark.parametrize("engine", DECODERS)
def test_the_token_at_which_it_begins_is_found(engine):
    decoder = DECODERS[engine]()
    fill(decoder)
    decoder.embed_unit().weight[17] = float("nan")
    watched = seen(decoder)
    assert watched.text.endswith("(Embedding): its weight holds 64 values that are not finite")
    assert (watched.row, watched.column) == (1, 5)


@pytest.mark.parametrize(
    ("engine", "module"),
    [("torchtune", "layers.1.mlp.w1"), ("transformers", "model.layers.1.mlp.gate_proj")],
)
def test_a_value_that_grows_too_large_is_told_from_a_damaged_weight(engine, module):
    decoder = DECODERS[engine]()
    fill(decoder)[f"{module}.weight"].fill_(1e38)
    watched = seen(decoder)
    assert watched.text.startswith(f"{module} (")
    assert watched.text.endswith("and its weights are finite, so a value grew too large in it")


def test_what_happens_between_modules_is_told_apart():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x):
            return self.second(self.first(x) * 1e38)

    module = Parent()
    with watching(SimpleNamespace(module=module), (2, 3)) as watched:
        module(torch.full((2, 3, 4), 10.0))
    assert watched.text.startswith("second (Identity): what it was given is not finite already")
    assert watched.num_done == 1


def test_a_forward_of_another_thread_is_not_looked_at():
    decoder = torchtune_decoder()
    fill(decoder)["norm.scale"].fill_(float("nan"))
    with watching(decoder, tuple(TOKENS_BT.shape)) as watched:
        other = threading.Thread(target=decoder.hidden, args=(TOKENS_BT, None, TOKENS_BT.shape[1]))
        other.start()
        other.join()
        assert (watched.text, watched.num_done) == ("", 0)
        decoder.hidden(TOKENS_BT, None, TOKENS_BT.shape[1])
    assert watched.text.startswith("norm (RMSNorm)")
