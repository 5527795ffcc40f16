"""Scoring: chunks, the memory of logits, dtypes, sums per window."""

import math

import numpy as np
import pytest
import torch
from torchtune.models.llama3 import llama3
from torchtune.models.llama3_2 import llama3_2

from helpers.tiny import SHAPE
from ppl_eval.scoring.nll import ScoringModel, rows_per_chunk, window_scores
from ppl_eval.scoring.softmax import Softmax, token_nll


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    model = llama3_2(**SHAPE).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    return model


def batch(labels):
    labels_BT = torch.tensor(labels)
    return torch.randint(0, SHAPE["vocab_size"], labels_BT.shape), labels_BT


def test_equals_cross_entropy_of_full_logits_whatever_the_chunk(decoder):
    tokens_BT, labels_BT = batch([[5, -100, 7, 9], [-100, -100, 3, 4]])
    full = llama3_2(**SHAPE).eval()
    full.load_state_dict(decoder.state_dict())
    expected = torch.nn.functional.cross_entropy(
        full(tokens_BT).double().flatten(0, 1), labels_BT.flatten(), reduction="none"
    )
    expected = expected[labels_BT.flatten() != -100]
    for rows in (1, 2, 100):
        scorer = ScoringModel(decoder, max_logits_bytes=4 * SHAPE["vocab_size"] * rows)
        nll_N, _ = scorer(tokens_BT, labels_BT)
        assert torch.allclose(nll_N.double(), expected, rtol=1e-5)


def test_logits_never_exceed_their_budget():
    shape = {name: value for name, value in SHAPE.items() if name != "scale_factor"}
    decoder = llama3(**shape).eval().requires_grad_(False)
    rows = []
    decoder.output.register_forward_hook(lambda head, inputs, logits: rows.append(len(logits)))
    scorer = ScoringModel(decoder, max_logits_bytes=4 * SHAPE["vocab_size"] * 3)
    scorer(*batch([[1] * 8]))
    assert rows == [3, 3, 2]


def test_of_equal_logits_the_first_is_the_most_likely_token():
    logits_NV = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    _, correct_N = token_nll(logits_NV, torch.tensor([1, 2, 0]))
    assert correct_N.tolist() == [True, False, True]


def test_details_by_hand():
    log3 = math.log(3.0)
    logits_NV = torch.tensor([[0.0, log3], [log3, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, -math.inf]])
    targets_N = torch.tensor([0, 0, 0, 1, 0])
    found = token_nll(logits_NV, targets_N, Softmax(details=True))
    _, correct_N, rank_N, top_N, entropy_N = found
    assert rank_N.tolist() == [2, 1, 1, 2, 1]
    assert top_N.tolist() == [1, 0, 0, 0, 0]
    assert correct_N.tolist() == [rank == 1 for rank in rank_N.tolist()]
    by_hand = math.log(4.0) - 0.75 * log3
    assert entropy_N.tolist() == pytest.approx([by_hand, by_hand, math.log(2), math.log(2), 0.0], rel=1e-6)


@pytest.mark.parametrize("rule", ["exact", "torch"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_details_leave_the_bits_of_nll_and_equal_float64(rule, rows):
    generator = torch.Generator().manual_seed(4)
    # As of a bfloat16 head: many logits are equal.
    logits_NV = (3 * torch.randn(rows, 49_152, generator=generator)).bfloat16().float()
    targets_N = torch.randint(0, 49_152, (rows,), generator=generator)
    nll_N, correct_N = token_nll(logits_NV.clone(), targets_N, Softmax(rule))
    detailed = token_nll(logits_NV.clone(), targets_N, Softmax(rule, details=True))
    assert torch.equal(detailed[0], nll_N)
    assert torch.equal(detailed[1], correct_N)
    order_NV = logits_NV.sort(dim=1, descending=True, stable=True).indices
    assert detailed[2].tolist() == (1 + (order_NV == targets_N[:, None]).int().argmax(dim=1)).tolist()
    assert detailed[3].tolist() == order_NV[:, 0].tolist()
    logp_NV = logits_NV.double().log_softmax(dim=1)
    torch.testing.assert_close(
        detailed[4].double(), -(logp_NV.exp() * logp_NV).sum(dim=1), rtol=3e-7, atol=1e-6
    )


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_the_exact_rule_equals_float64_where_torch_does_not(vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(64, vocab_size, generator=generator)
    targets_N = logits_NV.topk(20, dim=1).indices[:, -1]
    expected_N = torch.nn.functional.cross_entropy(logits_NV.double(), targets_N, reduction="none")

    def error(rule):
        nll_N, _ = token_nll(logits_NV.clone(), targets_N, Softmax(rule))
        return (nll_N.double() - expected_N).mean().item()

    assert abs(error("exact")) < 2e-7 * expected_N.mean().item()
    assert error("torch") < -5e-7, "if torch sums in a tree by now, softmax: torch has lost its reason"


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_nll_has_the_same_bits_for_any_number_of_threads_and_rows(rows):
    logits_NV = 3 * torch.randn(64, 49_152, generator=torch.Generator().manual_seed(1))
    targets_N = torch.arange(64)
    together, _ = token_nll(logits_NV.clone(), targets_N)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            nll_N, _ = token_nll(logits_NV[:rows].clone(), targets_N[:rows])
            assert torch.equal(nll_N, together[:rows])
    finally:
        torch.set_num_threads(threads)


def test_nll_by_hand_and_of_logits_that_are_not_finite():
    logits_NV = torch.tensor([[0.0, math.log(3.0)], [1e4, 0.0], [-math.inf, 0.0], [math.nan, 0.0]])
    nll_N, _ = token_nll(logits_NV, torch.tensor([0, 1, 0, 1]))
    assert nll_N[0].item() == pytest.approx(math.log(4.0), rel=1e-7)
    assert nll_N[1:3].tolist() == [1e4, math.inf]
    assert math.isnan(nll_N[3])


def test_rows_per_chunk_counts_every_copy():
    assert rows_per_chunk(1000, torch.float32, 4000 * 5) == 5
    assert rows_per_chunk(1000, torch.bfloat16, 6000 * 5) == 5
    assert rows_per_chunk(1000, torch.float64, 12_000 * 5) == 5
    assert rows_per_chunk(1000, torch.float32, 8000 * 5, "torch") == 5
    assert rows_per_chunk(1000, torch.bfloat16, 8000 * 5, "torch") == 5
    with pytest.raises(ValueError, match="raise max_logits_mib"):
        rows_per_chunk(1000, torch.float32, 3999)


def test_log_softmax_is_float32_in_a_bfloat16_model(decoder):
    model = llama3_2(**SHAPE).eval().requires_grad_(False)
    model.load_state_dict(decoder.state_dict())
    model.to(torch.bfloat16)
    tokens_BT, labels_BT = batch([[1, 2, 3, 4]])
    nll_N, _ = ScoringModel(model, 1 << 20)(tokens_BT, labels_BT)
    assert nll_N.dtype == torch.float32
    # bfloat16 keeps 8 bits: numbers that are all representable in it would show that the loss was rounded.
    assert not torch.equal(nll_N, nll_N.bfloat16().float())


def test_window_sums_by_hand():
    labels_BT = torch.tensor([[3, -100, 3], [-100, 3, -100]])
    nll_N = torch.tensor([1.0, 2.0, 4.0])
    scores = window_scores(nll_N, torch.tensor([True, False, True]), labels_BT, 2)
    assert scores.nll_sum_B.tolist() == [3.0, 4.0]
    assert scores.nll_sq_sum_B.tolist() == [5.0, 16.0]
    assert scores.num_tokens_B.tolist() == [2, 1]
    assert scores.num_correct_B.tolist() == [1, 1]


def test_window_sums_do_not_depend_on_threads():
    values = torch.from_numpy(np.random.default_rng(0).lognormal(0, 3, 70_000).astype(np.float32))
    labels_BT = torch.zeros(1, 70_000, dtype=torch.int64)
    found = set()
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.add(window_scores(values, values > 1, labels_BT, 1).nll_sum_B[0])
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(math.fsum(values.tolist()), rel=1e-14)


def test_a_dummy_scores_nothing(decoder):
    tokens_BT, labels_BT = batch([[-100]])
    nll_N, correct_N = ScoringModel(decoder, 1 << 20)(tokens_BT, labels_BT)
    assert len(window_scores(nll_N, correct_N, labels_BT, 0).nll_sum_B) == 0
