"""Standard errors: by hand, the same bits on any number of ranks, and intervals that cover as promised."""

import math

import numpy as np
import pytest

from ppl_eval.metrics.standard_error import Blocks, block_starts, student_t

NO_DOCUMENTS = np.array([0])


def blocks_of(nll: list[float], tokens: list[int]) -> Blocks:
    blocks = Blocks(len(nll), NO_DOCUMENTS)
    blocks.add(np.arange(len(nll)), np.array(nll), np.array(tokens))
    return blocks


def test_hand_numbers() -> None:
    # Residuals 2 - 8/3 and 6 - 16/3: K/(K-1) * (4/9 + 4/9) / 3^2.
    assert blocks_of([2.0, 6.0], [1, 2]).ce_loss_stderr() == pytest.approx(
        math.sqrt(2 * (8 / 9) / 9), rel=1e-15
    )


def test_too_few_blocks_say_so() -> None:
    assert blocks_of([2.0], [1]).ce_loss_stderr() is None
    # A block without scored tokens is no block.
    assert blocks_of([2.0, 0.0], [1, 0]).ce_loss_stderr() is None
    assert blocks_of([1.0] * 4, [1] * 4).half_width_95() is None
    assert blocks_of([1.0] * 5, [1] * 5).half_width_95() == 0.0


def test_where_blocks_begin() -> None:
    assert block_starts(3, NO_DOCUMENTS)[1].tolist() == [0, 1, 2]
    kind, starts = block_starts(64, NO_DOCUMENTS)
    assert (kind, starts.tolist()) == ("windows", list(range(0, 64, 2)))
    # Twelve documents are twelve blocks, of whatever length.
    documents = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 500])
    assert block_starts(1000, documents) == ("documents", pytest.approx(documents))
    # A thousand documents of three windows make 32 blocks, none of which cuts one.
    kind, starts = block_starts(3000, np.arange(0, 3000, 3))
    assert (kind, len(starts)) == ("documents", 32)
    assert (starts % 3 == 0).all()
    assert np.diff(starts).max() - np.diff(starts).min() <= 3


def test_any_sharding_gives_the_same_bits() -> None:
    random = np.random.default_rng(1)
    nll, tokens = random.gamma(2.0, 50.0, 500), random.integers(0, 64, 500)
    whole = Blocks(500, NO_DOCUMENTS)
    whole.add(np.arange(500), nll, tokens)
    for num_ranks in (2, 3, 7):
        vectors = []
        for rank in range(num_ranks):
            part, mine = Blocks(500, NO_DOCUMENTS), np.arange(rank, 500, num_ranks)
            for windows in np.array_split(random.permutation(mine), 5):
                part.add(windows, nll[windows], tokens[windows])
            vectors.append(part.pack())
        joined = Blocks(500, NO_DOCUMENTS)
        joined.unpack(np.sum(vectors, axis=0))
        assert joined.ce_loss_stderr() == whole.ce_loss_stderr()
        assert joined.half_width_95() == whole.half_width_95()


def test_student_t() -> None:
    # From printed tables, four decimals.
    for degrees, quantile in ((4, 2.7764), (9, 2.2622), (31, 2.0395), (1000, 1.9623)):
        assert student_t(0.975, degrees) == pytest.approx(quantile, rel=5e-4)


def hits(nll: np.ndarray, truth: float, document_starts: np.ndarray) -> tuple[bool, bool, bool]:
    """Whether the 95 % interval from blocks, from single windows, and from single tokens holds the truth.

    Args:
        nll: [windows, tokens].
        truth: the mean that the tokens were drawn with.
        document_starts: first window of each document.
    """
    sums, num_tokens = nll.sum(axis=1), np.full(len(nll), nll.shape[1])
    blocks = Blocks(len(nll), document_starts)
    blocks.add(np.arange(len(nll)), sums, num_tokens)
    half_width = blocks.half_width_95()
    assert half_width is not None
    error = abs(nll.mean() - truth)
    by_window = 1.96 * nll.mean(axis=1).std(ddof=1) / len(nll) ** 0.5
    by_token = 1.96 * nll.std(ddof=1) / nll.size**0.5
    return error < half_width, error < by_window, error < by_token


def coverage(outcomes: list[tuple[bool, bool, bool]]) -> np.ndarray:
    return np.mean(outcomes, axis=0)


REPETITIONS = 1000


def test_interval_covers_with_tokens_that_depend_on_each_other_across_windows() -> None:
    """One long stream: difficulty drifts over some windows, as it does over the pages of a book."""
    random = np.random.default_rng(0)
    num_windows, num_tokens, keep = 800, 16, 0.7
    outcomes = []
    drift = np.zeros((REPETITIONS, num_windows))
    drift[:, 0] = random.normal(size=REPETITIONS)
    for window in range(1, num_windows):
        fresh = random.normal(size=REPETITIONS)
        drift[:, window] = keep * drift[:, window - 1] + (1 - keep**2) ** 0.5 * fresh
    for repetition in range(REPETITIONS):
        noise = random.exponential(2.0, size=(num_windows, num_tokens)) - 2.0
        outcomes.append(hits(3.0 + 0.6 * drift[repetition][:, None] + noise, 3.0, NO_DOCUMENTS))
    blocks, windows, tokens = coverage(outcomes)
    assert 0.93 <= blocks <= 0.97
    # Intervals that take windows or tokens as independent are wrong a good part of the time.
    assert windows < 0.75
    assert tokens < 0.75


def test_interval_covers_with_documents_that_differ() -> None:
    """Many documents, each hard or easy as a whole, of one to twenty windows."""
    random = np.random.default_rng(2)
    outcomes = []
    for _ in range(REPETITIONS):
        lengths = random.integers(1, 21, size=60)
        level = np.repeat(random.normal(3.0, 0.5, size=60), lengths)
        nll = level[:, None] + random.exponential(2.0, size=(lengths.sum(), 16)) - 2.0
        outcomes.append(hits(nll, 3.0, np.cumsum(lengths) - lengths))
    blocks, windows, tokens = coverage(outcomes)
    assert 0.93 <= blocks <= 0.97
    assert windows < 0.75
    assert tokens < 0.75
