"""The paired difference against numbers worked out by hand and by simulation."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppl_eval.metrics.paired import against_baseline, paired_difference, sentence, shared_windows
from ppl_eval.results import baseline


def test_by_hand():
    # d = 1, 3, 2 over n = 1, 2, 1 tokens: r = 6/4; residuals -0.5, 0, 0.5; var = 3/2 * 0.5 / 16
    mean, stderr = paired_difference(np.array([1.0, 3.0, 2.0]), np.array([1.0, 2.0, 1.0]))
    assert mean == 1.5
    assert stderr == pytest.approx((0.75 / 16) ** 0.5)
    assert paired_difference(np.array([2.0]), np.array([4.0])) == (0.5, None)
    # A window without scored tokens adds no certainty.
    assert paired_difference(np.array([2.0, 0.0]), np.array([4, 0])) == (0.5, None)
    with_empty = paired_difference(np.array([1.0, 0.0, 3.0, 2.0]), np.array([1, 0, 2, 1]))
    assert with_empty == (mean, stderr)


def test_neighbours_that_are_alike_do_not_make_it_surer():
    # 40 documents of 25 windows; a document's windows share half of their difference's variance.
    rng = np.random.default_rng(1)
    num_tokens, document = np.full(1000, 50), np.repeat(np.arange(40), 25)
    means, stderrs = [], []
    for _ in range(300):
        shared, own = rng.normal(0, 1, 40)[document], rng.normal(0, 1, 1000)
        mean, stderr = paired_difference(shared + own, num_tokens, document)
        means.append(mean)
        stderrs.append(stderr)
    assert np.sqrt(np.mean(np.square(stderrs))) == pytest.approx(np.std(means), rel=0.15)


def test_windows_of_equal_content_are_matched_once_each():
    here, there = shared_windows(np.array([7, 5, 7, 9, -3]), np.array([-3, 7, 8, 7, 7]))
    assert here.tolist() == [0, 2, 4]
    assert there.tolist() == [1, 3, 0]


def test_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        num_tokens = rng.integers(20, 100, size=50).astype(float)
        found.append(paired_difference(0.1 * num_tokens + rng.normal(0, num_tokens**0.5), num_tokens))
    means, stderrs = np.array(found).T
    assert means.mean() == pytest.approx(0.1, abs=3 * means.std() / 2000**0.5)
    assert np.sqrt((stderrs**2).mean()) == pytest.approx(means.std(), rel=0.1)


def test_without_window_files_only_the_ratio_is_sentence(tmp_path):
    found = against_baseline({"ce_loss": 2.5}, {"ce_loss": 2.0}, tmp_path, tmp_path, same_windows=True)
    assert found["perplexity_ratio"] == pytest.approx(np.exp(0.5))
    assert found["ce_loss_difference_stderr"] is None
    assert "needs per_window=true in both runs" in sentence(found)


def test_a_table_that_another_run_left_is_not_used(tmp_path):
    results = []
    for name, nll in (("ours", [3.0, 5.0]), ("theirs", [2.0, 5.0])):
        (tmp_path / name).mkdir()
        table = pa.table({"content": [0, 1], "document": [0, 0], "num_tokens": [2, 2], "nll_sum": nll})
        pq.write_table(table, tmp_path / name / "windows.parquet")
        results.append({"ce_loss": sum(nll) / 4, "num_tokens": 4, "nll_sum": sum(nll)})
    found = against_baseline(*results, tmp_path / "ours", tmp_path / "theirs", same_windows=True)
    assert found["ce_loss_difference"] == 0.25
    assert found["ce_loss_difference_stderr"] == pytest.approx(0.25)
    assert "+0.250000 ± 0.250000 nats per token" in sentence(found)
    stale = results[1] | {"nll_sum": 7.1}
    found = against_baseline(results[0], stale, tmp_path / "ours", tmp_path / "theirs", same_windows=True)
    assert found["ce_loss_difference_stderr"] is None


def test_quantised_against_full_precision_is_not_gated_unless_asked():
    full = {"ce_loss": 2.0, "perplexity": 7.4, "nll_sum_hex": "0x1p0", "quantizer": None}
    quantised = {"ce_loss": 2.1, "perplexity": 8.2, "nll_sum_hex": "0x1p1", "quantizer": {"scheme": "int4"}}
    again = {
        "ce_loss": 2.1,
        "perplexity": 8.2,
        "nll_sum_hex": "0x1p1",
        "model": {"quantized_checkpoint": True},
    }
    for result in (quantised, again):
        code, message = baseline.compare(result, full, 0)
        assert code == 0
        assert "compared, not gated" in message
        assert baseline.compare(result, full, 0.01)[0] == baseline.EXIT_MISMATCH
        assert baseline.compare(full, result, 0)[0] == baseline.EXIT_MISMATCH
    assert baseline.compare(quantised | {"nll_sum_hex": "0x1p2"}, quantised, 0)[0] == baseline.EXIT_MISMATCH
