"""float32 products: a row has the same bits whatever the number of rows and threads."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.models.llama3_2 import llama3_2

from helpers.tiny import SHAPE
from ppl_eval.models import cpu_linear

pytestmark = pytest.mark.skipif(not cpu_linear.is_available(), reason="needs oneDNN on x86")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(64, 64), (101, 48), (1536, 576), (64, 1536), (1, 8)])
def test_rows_and_threads_change_no_bit(shape, threads):
    x, weight, bias = torch.randn(300, shape[1]), torch.randn(shape), torch.randn(shape[0])
    threads(1)
    expected = cpu_linear.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-5 * shape[1] ** 0.5)
    for number in (1, 2, 3, 7):
        threads(number)
        for rows in (1, 2, 3, 5, 8, 9, 17, 31, 64, 100, 257):
            assert torch.equal(cpu_linear.linear(x[:rows], weight, bias), expected[:rows]), (number, rows)


def test_every_shape_and_other_tensors():
    weight = torch.randn(3, 4)
    assert cpu_linear.linear(torch.ones(0, 4), weight).shape == (0, 3)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(cpu_linear.linear(x.mT.contiguous().mT, weight), F.linear(x, weight))
    half = x.bfloat16(), weight.bfloat16()
    assert torch.equal(cpu_linear.linear(*half), F.linear(*half))
    double = x.double(), weight.double()
    assert torch.equal(cpu_linear.linear(*double), F.linear(*double))


@pytest.mark.parametrize("head", ["tied", "own"])
def test_install_reaches_every_product_and_keeps_the_names(head, monkeypatch):
    model = llama3_2(**SHAPE).eval().requires_grad_(False)
    if head == "own":
        model.output = nn.Linear(SHAPE["embed_dim"], SHAPE["vocab_size"], bias=False).requires_grad_(False)
    names, tokens = list(model.state_dict()), torch.arange(12)[None]
    before = model(tokens)
    cpu_linear.install(model)
    assert list(model.state_dict()) == names

    def refused(*_):
        raise AssertionError("a product of MKL's")

    monkeypatch.setattr(F, "linear", refused)
    torch.testing.assert_close(model(tokens), before)
