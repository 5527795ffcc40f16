"""Activations of whole vectors: torch's values, whatever the number of threads and whatever stands beside."""

import pytest
import torch
from torch import nn

from ppl_eval.models.cpu_activation import WholeVectors, install

ACTIVATIONS = [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")]
# Numbers that end within a vector and at its end, for one thread and for several.
SHAPES = [(1, 1), (7, 13), (8, 100), (64, 512), (65, 512), (129, 1024), (8, 4104), (40, 11008), (997, 1001)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_threads_and_neighbours_change_no_bit(activation, dtype, threads):
    whole = WholeVectors(activation)
    for shape in SHAPES:
        x = (3 * torch.randn(shape)).to(dtype)
        threads(1)
        expected = whole(x)
        torch.testing.assert_close(expected, activation(x))
        for number in (1, 2, 3, 5, 12):
            threads(number)
            for first in {0, 1, shape[0] // 2}:
                assert torch.equal(whole(x[first:]), expected[first:]), (shape, number, first)


def test_an_empty_tensor_and_a_view():
    whole = WholeVectors(nn.SiLU())
    assert whole(torch.ones(0, 3)).shape == (0, 3)
    x = torch.randn(6, 500)
    torch.testing.assert_close(whole(x.T), nn.functional.silu(x.T))


@torch.no_grad()
def test_install_reaches_every_layer_and_keeps_the_names():
    shared = nn.SiLU()
    model = nn.Sequential(nn.Linear(3, 4), shared, nn.Sequential(shared, nn.GELU(approximate="tanh")))
    names, x = list(model.state_dict()), torch.randn(5, 3)
    before = model(x)
    install(model)
    assert [type(module).__name__ for module in (model[1], *model[2])] == ["WholeVectors"] * 3
    assert model[1] is model[2][0]
    torch.testing.assert_close(model(x), before)
    assert list(model.state_dict()) == names
