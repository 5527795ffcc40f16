"""Windows whose NLL is not finite, named and left out."""

import numpy as np
import pytest
import torch

from ppl_eval.metrics.totals import TokenComparison, Totals, joined_scores
from ppl_eval.metrics.window_records import records_of
from ppl_eval.protocols.batches import Batch
from ppl_eval.scoring import finite
from ppl_eval.scoring.nll import window_scores

LABELS_BT = torch.tensor([[3, -100, 3], [-100, 3, -100], [3, 3, -100]])


def test_scores_of_parts_are_those_of_the_batch():
    """A batch that went through the model in parts."""
    batch, scores = batch_and_scores(16.0)
    parts = []
    for begin, targets in ((0, slice(0, 2)), (1, slice(2, 3)), (2, slice(3, 5))):
        part = batch.part(begin, begin + 1)
        assert part.window_ids_B.tolist() == [7 + begin]
        nll_N = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[targets]
        own = window_scores(nll_N, torch.tensor([True, False, True, True, True])[targets], part.labels_BT, 1)
        details = tuple(values_N[targets] for values_N in scores.details_N)
        compared = TokenComparison._make(values_N[targets] for values_N in scores.comparison)
        parts.append(own._replace(details_N=details, comparison=compared))
    joined = joined_scores(parts)
    for name in ("nll_sum_B", "nll_sq_sum_B", "num_tokens_B", "num_correct_B", "nll_BT", "correct_BT"):
        assert np.array_equal(getattr(joined, name), getattr(scores, name))
        assert getattr(joined, name).dtype == getattr(scores, name).dtype
    assert joined.num_excluded_B is None
    assert joined.in_parts
    assert joined_scores(parts[:1]) is parts[0]
    for ours, expected in zip((*joined.details_N, *joined.comparison), [np.arange(5)] * 7, strict=True):
        assert np.array_equal(ours, expected)


def batch_and_scores(bad: float):
    """Three windows of 2, 1 and 2 targets; one of the last has an NLL of ``bad``."""
    ids = np.arange(7, 10)
    batch = Batch(LABELS_BT, LABELS_BT, ids, ids * 0, ids * 10, np.ones((3, 4), dtype=np.uint64))
    nll_N = torch.tensor([1.0, 2.0, 4.0, 8.0, bad])
    scores = window_scores(nll_N, torch.tensor([True, False, True, True, True]), LABELS_BT, 3)
    details = tuple(np.arange(5) for _ in range(3))
    compared = TokenComparison(*(np.arange(5, dtype=np.float32) for _ in range(3)), np.arange(5))
    return batch, scores._replace(details_N=details, comparison=compared)


# The last is finite, and its square more than any total can hold.
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**31])
def test_a_window_is_left_out_whole(bad):
    batch, scores = batch_and_scores(bad)
    scores = scores._replace(in_parts=True)
    assert finite.not_finite(scores).tolist() == [False, False, True]
    words = f"window 9 (document 0, from its token 90) has NLL {bad + 8} on host 1"
    assert finite.describe(batch, scores, "host 1") == words
    kept = finite.exclude(batch, scores)
    assert kept.nll_sum_B.tolist() == [3.0, 4.0, 0.0]
    assert kept.nll_sq_sum_B.tolist() == [5.0, 16.0, 0.0]
    assert kept.num_tokens_B.tolist() == [2, 1, 0]
    assert kept.num_correct_B.tolist() == [1, 1, 0]
    assert kept.num_excluded_B.tolist() == [0, 0, 2]
    assert [values_N.tolist() for values_N in (*kept.details_N, *kept.comparison)] == [[0, 1, 2]] * 7
    assert finite.not_finite(scores)[2], "the scores that it was given stay as they are"
    records = records_of(batch, kept, 3, 1)
    assert records["num_excluded"].tolist() == [0, 0, 2]
    assert records["in_parts"].tolist() == [1, 1, 1]
    assert records["bucket_tokens"].tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert records["bucket_excluded"].tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert records["kl_sum"].tolist() == [1.0, 2.0, 0.0]
    assert (records["scored_hash_sums"] == 1).all()
    with pytest.raises(AssertionError, match="not finite"):
        Totals().add(scores)
