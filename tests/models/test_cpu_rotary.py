"""Rotary embeddings in whole vectors: torchtune's bits, for every dtype, shape and position."""

import pytest
import torch
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import RotaryPositionalEmbeddings

from helpers.tiny import SHAPE
from ppl_eval.models import cpu_rotary as rotary


@pytest.mark.parametrize("kind", [RotaryPositionalEmbeddings, Llama3ScaledRoPE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length", "heads"), [(1, 1, 1), (2, 13, 3), (1, 64, 9), (3, 100, 2)])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_the_same_bits_as_torchtune(kind, dtype, batch, length, heads, dim):
    rope = kind(dim=dim, max_seq_len=128)
    x = torch.randn(batch, length, heads, dim).to(dtype)
    whole = rotary.WholeRotary(rope)
    assert torch.equal(whole(x), rope(x))
    assert torch.equal(whole(x[:, :1]), rope(x[:, :1]))
    input_pos = torch.randint(0, 128, (batch, length))
    assert torch.equal(whole(x, input_pos=input_pos), rope(x, input_pos=input_pos))


def test_a_view_into_a_larger_tensor():
    rope = RotaryPositionalEmbeddings(8, max_seq_len=16)
    x = torch.randn(1, 10, 3, 24)[..., 8:16]
    assert torch.equal(rotary.WholeRotary(rope)(x), rope(x))


def test_the_number_of_threads_changes_no_bit():
    whole = rotary.WholeRotary(RotaryPositionalEmbeddings(6, max_seq_len=1024))
    x = torch.randn(3, 1021, 7, 6)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(whole(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_model_shares_one_and_keeps_its_names():
    model = llama3_2(**SHAPE).eval()
    names = list(model.state_dict())
    tokens = torch.arange(12)[None]
    before = model(tokens)
    rotary.install(model)
    assert torch.equal(model(tokens), before)
    assert list(model.state_dict()) == names
    assert len({id(layer.attn.pos_embeddings) for layer in model.layers}) == 1
    assert isinstance(model.layers[0].attn.pos_embeddings, rotary.WholeRotary)
