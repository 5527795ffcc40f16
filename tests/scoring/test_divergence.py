"""KL divergence of two chunks of logits: by hand, in float64, by llama-perplexity's rules, over ranks."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import llama_kld
from helpers.processes import run_ranks
from ppl_eval.parallel.tensor_parallel import bounds
from ppl_eval.scoring.divergence import compare_logits
from ppl_eval.scoring.token_details import row_groups


def pair(change: float, rows: int = 40, vocab: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(change * 1e6))
    reference_NV = torch.randn(rows, vocab, generator=generator) * 3
    noise_NV = torch.randn(rows, vocab, generator=generator)
    return reference_NV, reference_NV + change * noise_NV + 5 * change


def in_float64(first_NV: torch.Tensor, second_NV: torch.Tensor) -> torch.Tensor:
    p, q = first_NV.double().log_softmax(1), second_NV.double().log_softmax(1)
    return (p.exp() * (p - q)).nansum(1)


def test_by_hand() -> None:
    # Probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4, whatever is added to a row.
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log() + torch.tensor([[0.0], [7.0]])
    model = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    found = compare_logits(reference, model)
    assert found.kl_N.tolist() == pytest.approx([0.25 * math.log(2), 0.0], rel=1e-6, abs=1e-13)
    assert found.reverse_kl_N.tolist() == pytest.approx([0.25 * math.log(2), 0.0], rel=1e-6, abs=1e-13)
    # The reference's first token is second to token 1, and before the equal token 2.
    assert found.top_rank_N.tolist() == [2, 1]
    assert compare_logits(reference[:0], model[:0]).kl_N.shape == (0,)


@pytest.mark.parametrize(("change", "error"), [(1e-4, 1e-3), (1e-2, 2e-5), (1.0, 3e-6), (20.0, 3e-6)])
def test_close_models_lose_no_digits(change: float, error: float) -> None:
    """At 1e-4 KL is 5e-9: by its definition float32 gives noise a hundred times as large."""
    reference, model = pair(change)
    found = compare_logits(reference.clone(), model.clone())
    torch.testing.assert_close(found.kl_N.double(), in_float64(reference, model), rtol=error, atol=0)
    torch.testing.assert_close(found.reverse_kl_N.double(), in_float64(model, reference), rtol=error, atol=0)
    top_N1 = reference.argmax(dim=1, keepdim=True)
    rank_N = 1 + (model > model.gather(1, top_N1)).sum(dim=1)
    assert found.top_rank_N.tolist() == rank_N.tolist()


def test_llama_perplexity_computes_the_same_but_for_its_cut_and_its_base_file() -> None:
    reference, model = pair(0.3, rows=200, vocab=1000)
    base_NV, logits_NV = reference.double().numpy(), model.double().numpy()
    exact_NV, targets = llama_kld.log_probabilities(base_NV), np.arange(200)
    kl_N = compare_logits(reference, model).kl_N.numpy()
    whole = llama_kld.statistics(exact_NV, logits_NV, targets, cut=-math.inf)
    np.testing.assert_allclose(kl_N, whole["kld"], rtol=3e-6)
    # Tokens below e^-16 have up to 1e-4 of a row's probability here; 16 bits add up to half a level's error.
    printed = llama_kld.statistics(llama_kld.base_file(base_NV), logits_NV, targets)
    assert 1e-9 < np.abs(printed["kld"] - whole["kld"]).max() < 1e-4
    assert abs(printed["kl_mean"] - whole["kl_mean"]) < 1e-5


def test_what_a_model_rules_out_is_infinitely_far() -> None:
    none = -math.inf
    reference = torch.tensor([[0.0, 0.0, none], [0.0, none, none], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    model = torch.tensor([[0.0, none, none], [0.0, none, none], [0.0, -300.0, -300.0], [0.0, 0.0, 0.0]])
    found = compare_logits(reference, model)
    assert found.kl_N[0] == math.inf
    assert found.reverse_kl_N[0].item() == pytest.approx(math.log(2))
    assert found.kl_N[1] == found.reverse_kl_N[1] == 0
    assert found.kl_N[2].item() == pytest.approx(200 - math.log(3), rel=1e-6)
    assert found.reverse_kl_N[2].item() == pytest.approx(math.log(3), rel=1e-6)
    assert found.kl_N[3].isnan()
    assert found.reverse_kl_N[3].isnan()


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that is made, views of the given ones aside."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.numel, self._given = 0, {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in self._given:
            self.numel = max(self.numel, found.numel())
        return found


def test_only_a_few_rows_of_logits_exist_beside_the_chunks() -> None:
    reference, model = pair(0.1, rows=64)
    rows = row_groups(model)[0].stop
    with _Largest(reference, model) as largest:
        compare_logits(reference, model)
    assert largest.numel == rows * model.shape[1]


@run_ranks(2, 3)
def test_a_split_vocabulary_gives_the_same(world_size: int) -> None:
    reference, model = pair(0.2, rows=30, vocab=101)
    reference[0, [3, 90]] = 50.0  # of equals, on different ranks, the first
    model[1] = 0.0
    model[2, 100] = -math.inf
    whole = compare_logits(reference, model)
    start, stop = bounds(101, world_size, dist.get_rank())
    own = (reference[:, start:stop].contiguous(), model[:, start:stop].contiguous())
    found = compare_logits(*own, start, dist.group.WORLD)
    torch.testing.assert_close(found.kl_N, whole.kl_N, rtol=5e-6, atol=1e-12)
    torch.testing.assert_close(found.reverse_kl_N, whole.reverse_kl_N, rtol=5e-6, atol=1e-12)
    assert found.top_rank_N.tolist() == whole.top_rank_N.tolist()
    assert whole.kl_N[2] == math.inf
