"""A comparison's records, sums and figures, from scores made by hand: by llama-perplexity's definitions, by
domain and position, the same bits for any number of ranks."""

import math

import numpy as np
import pytest

from helpers import llama_kld
from metrics.test_figures import DOMAIN_D, DOMAINS, LENGTHS, joined, made, scored
from ppl_eval import protocols
from ppl_eval.metrics import comparison
from ppl_eval.metrics import figures as metrics
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.metrics.paired import paired_difference
from ppl_eval.metrics.totals import TokenComparison
from ppl_eval.metrics.window_records import records_of, whole_records
from ppl_eval.protocols.batches import WindowBatches

BUCKETS = 2


def compared(batch):
    """Scores beside a reference: every third token has another top token, NLL differs token by token."""
    scores = scored(batch)
    nll_N = scores.nll_BT[batch.labels_BT.numpy() != -100].astype(np.float32)
    number_N = np.arange(len(nll_N)) + int(batch.window_ids_B.sum())
    return scores._replace(
        comparison=TokenComparison(
            nll_N * np.float32(0.9) + np.float32(0.01) * (number_N % 5),
            (0.001 + 0.01 * (number_N % 7)).astype(np.float32),
            (0.002 + 0.01 * (number_N % 7)).astype(np.float32),
            1 + 4 * (number_N % 3 == 0),
        )
    )


def all_sums(num_ranks: int):
    """Sums over ranks, and the tokens behind them."""
    plan, data = made(LENGTHS, protocols.rolling(8), DOMAIN_D)
    batches = WindowBatches(plan, data, prefix_token=1)
    ranks = [Accumulator(plan, data, BUCKETS, compared=True) for _ in range(num_ranks)]
    tokens = []
    for index in range(plan.num_batches):
        scores, batch = compared(batches[index]), batches[index]
        sums = ranks[index % num_ranks]
        records = records_of(batch, scores, BUCKETS, sums.bucket_width)
        sums.add(records)
        scored_BT = batch.labels_BT.numpy() != -100
        window_N, column_N = np.nonzero(scored_BT)
        tokens.append((batch, scores, window_N, column_N))
        assert len(whole_records(records)) == len(records)
    return joined(ranks), plan, data, tokens


def test_figures_are_those_of_the_tokens_whatever_the_ranks() -> None:
    sums, plan, data, tokens = all_sums(1)
    found = metrics.all_figures(sums, plan.protocol, data, None)
    for num_ranks in (2, 3, 50):
        others, *_ = all_sums(num_ranks)
        assert metrics.all_figures(others, plan.protocol, data, None) == found

    nll_N = np.concatenate([s.nll_BT[w, c] for _, s, w, c in tokens])
    reference_N, kl_N, reverse_N, rank_N = (
        np.concatenate([getattr(s.comparison, name) for _, s, _, _ in tokens]).astype(np.float64)
        for name in TokenComparison._fields
    )
    here = found["comparison"]
    assert here["kl_sum_hex"] == math.fsum(kl_N).hex()
    assert here["reference_nll_sum_hex"] == math.fsum(reference_N).hex()
    assert here["kl_mean"] == pytest.approx(kl_N.mean(), rel=1e-14)
    assert here["reverse_kl_mean"] == pytest.approx(reverse_N.mean(), rel=1e-14)
    assert here["reference_perplexity"] == pytest.approx(math.exp(reference_N.mean()))
    assert here["perplexity_ratio"] == pytest.approx(math.exp((nll_N - reference_N).mean()))
    assert here["perplexity_ratio"] * here["reference_perplexity"] == pytest.approx(found["perplexity"])
    change_N = np.exp(-nll_N) - np.exp(-reference_N)
    assert here["probability_change_mean"] == pytest.approx(change_N.mean(), rel=1e-9)
    assert here["probability_change_rms"] == pytest.approx(np.sqrt((change_N**2).mean()))
    assert here["same_top"] == pytest.approx((rank_N == 1).mean())
    assert here["top_rank_mean"] == pytest.approx(rank_N.mean())
    # llama-perplexity's mean_and_uncertainty.
    alone = math.sqrt((np.square(kl_N).mean() - kl_N.mean() ** 2) / (len(kl_N) - 1))
    assert here["kl_stderr_of_independent_tokens"] == pytest.approx(alone)

    for index, name in enumerate(DOMAINS[:2]):
        of_N = np.concatenate([data.domain_D[b.document_B[w]] == index for b, _, w, _ in tokens])
        part = found["domains"][name]["comparison"]
        assert part["kl_mean"] == pytest.approx(kl_N[of_N].mean(), rel=1e-14)
        assert part["same_top"] == pytest.approx((rank_N == 1)[of_N].mean())
    assert found["domains"]["absent"]["comparison"] == {}

    column_N = np.concatenate([c for *_, c in tokens])
    for index, position in enumerate(found["positions"]):
        of_N = column_N // sums.bucket_width == index
        part = position["comparison"]
        assert part["kl_mean"] == pytest.approx(kl_N[of_N].mean(), rel=1e-14)
        assert part["perplexity_ratio"] == pytest.approx(math.exp((nll_N - reference_N)[of_N].mean()))
        assert part["probability_change_rms"] == pytest.approx(np.sqrt((change_N[of_N] ** 2).mean()))
        assert part["same_top"] == pytest.approx((rank_N == 1)[of_N].mean())


def test_the_error_of_the_ratio_is_that_of_paired_windows() -> None:
    sums, _, _, tokens = all_sums(2)
    here = comparison.ratio(sums.run.compared, sums.run.totals.nll_fixed, sums.run.totals.num_tokens)
    difference_W, tokens_W, document_W = [], [], []
    for batch, scores, window_N, _ in tokens:
        reference = scores.comparison.reference_nll_N.astype(np.float64)
        for window in range(len(batch.window_ids_B)):
            difference_W.append(scores.nll_sum_B[window] - reference[window_N == window].sum())
            tokens_W.append((window_N == window).sum())
            document_W.append(batch.document_B[window])
    mean, stderr = paired_difference(*map(np.array, (difference_W, tokens_W, document_W)))
    assert here["ce_loss_difference"] == pytest.approx(mean, rel=1e-12)
    assert here["ce_loss_difference_stderr"] == pytest.approx(stderr, rel=1e-12)
    low, high = here["perplexity_ratio_interval_95"]
    assert low < here["perplexity_ratio"] < high


def test_llama_perplexity_gives_these_figures() -> None:
    """Its formulas over logits of two models, our sums over the tokens that come out."""
    generator = np.random.default_rng(3)
    base_NV = generator.normal(0, 2, (400, 50))
    logits_NV = base_NV + generator.normal(0, 0.2, base_NV.shape)
    targets_N = generator.integers(0, 50, 400)
    printed = llama_kld.statistics(llama_kld.log_probabilities(base_NV), logits_NV, targets_N, cut=-math.inf)
    rows = np.arange(400)
    nll_N = -llama_kld.log_probabilities(logits_NV)[rows, targets_N]
    reference_N = -llama_kld.log_probabilities(base_NV)[rows, targets_N]
    top_N = base_NV.argmax(axis=1)
    rank_N = 1 + (logits_NV > logits_NV[rows, top_N][:, None]).sum(axis=1)

    dtype = [("nll_sum", "f8"), ("num_tokens", "i8"), *comparison.record_fields(0)]
    records = np.zeros(4, dtype=dtype)
    found = TokenComparison(reference_N, printed["kld"], printed["kld"], rank_N)
    comparison.fill_records(records, nll_N.reshape(4, 100), np.ones((4, 100), dtype=bool), found, 0)
    records["nll_sum"], records["num_tokens"] = nll_N.reshape(4, 100).sum(axis=1), 100
    sums = comparison.ComparedSums(4, np.zeros(1, dtype=np.int64))
    sums.add(records, np.arange(4))
    figures = comparison.figures(sums, round(nll_N.sum() * 2**96), 400)
    for ours, theirs in {
        "kl_mean": "kl_mean",
        "kl_stderr_of_independent_tokens": "kl_stderr",
        "ce_loss_difference": "ln_ratio",
        "probability_change_mean": "change_mean",
        "probability_change_rms": "change_rms",
        "same_top": "same_top",
    }.items():
        assert figures[ours] == pytest.approx(printed[theirs], rel=1e-9), ours
