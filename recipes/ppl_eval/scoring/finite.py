"""Windows whose NLL is not finite: named, or left out of every sum."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.metrics.totals import LARGEST, TokenComparison, WindowScores
from ppl_eval.metrics.window_records import targets_of
from ppl_eval.protocols.base import BoolArray
from ppl_eval.protocols.batches import Batch


def not_finite(scores: WindowScores) -> BoolArray:
    """Return which windows of a batch have an NLL that is NaN, infinite, or so large that no total holds its
    square (2^31 nats a token), or a comparison that is not finite; bool [B]."""
    return _no_nll(scores) | _not_comparable(scores)


def _no_nll(scores: WindowScores) -> BoolArray:
    return np.asarray(~(scores.nll_sq_sum_B < LARGEST))


def _not_comparable(scores: WindowScores) -> BoolArray:
    if scores.comparison is None:
        return np.zeros(len(scores.nll_sum_B), dtype=np.bool_)
    *values, _ = scores.comparison
    bad_N = ~np.isfinite(np.stack(values)).all(axis=0)
    window_N = np.repeat(np.arange(len(scores.num_tokens_B)), scores.num_tokens_B)
    return np.asarray(np.bincount(window_N[bad_N], minlength=len(scores.num_tokens_B)) > 0)


def describe(batch: Batch, scores: WindowScores, where: str) -> str:
    """Say which is the first window of a batch whose NLL is not finite.

    Args:
        batch: the batch; it has such a window.
        scores: what it scored.
        where: this process.
    """
    bad = int(np.flatnonzero(not_finite(scores))[0])
    window = (
        f"window {batch.window_ids_B[bad]} (document {batch.document_B[bad]}, from its token"
        f" {batch.start_B[bad]})"
    )
    if not _no_nll(scores)[bad]:
        return (
            f"{window} has no finite KL divergence from the reference on {where} (NLL"
            f" {scores.nll_sum_B[bad]}): one of the two rules a token out, or the reference's NLL is not"
            " finite"
        )
    return f"{window} has NLL {scores.nll_sum_B[bad]} on {where}"


def exclude(batch: Batch, scores: WindowScores) -> WindowScores:
    """Leave the windows whose NLL is not finite out of a batch's scores.

    Args:
        batch: the batch.
        scores: what it scored.

    Returns:
        Scores in which these windows have nothing but ``num_excluded_B``, the number of their targets.
    """
    excluded_B = not_finite(scores)
    num_excluded_B = np.where(excluded_B, scores.num_tokens_B, 0)
    kept_N = np.repeat(~excluded_B, scores.num_tokens_B)

    def keep(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        values = values.copy()
        values[excluded_B] = 0
        return values

    assert scores.nll_BT is not None
    assert scores.correct_BT is not None
    found = scores.comparison
    kept = scores._replace(
        nll_sum_B=keep(scores.nll_sum_B),
        nll_sq_sum_B=keep(scores.nll_sq_sum_B),
        num_tokens_B=keep(scores.num_tokens_B),
        num_correct_B=keep(scores.num_correct_B),
        nll_BT=keep(scores.nll_BT),
        correct_BT=keep(scores.correct_BT),
        details_N=tuple(values_N[kept_N] for values_N in scores.details_N),
        comparison=None if found is None else TokenComparison._make(values_N[kept_N] for values_N in found),
        num_excluded_B=num_excluded_B,
    )
    assert targets_of(batch, kept)[0].sum() == kept.num_tokens_B.sum()
    return kept
