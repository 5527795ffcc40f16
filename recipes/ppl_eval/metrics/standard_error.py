"""How sure a perplexity is: a standard error from blocks of neighbouring windows.

Tokens of a window depend on each other, and so do windows of a document, so neither may be counted as
independent: an interval from single windows holds the true value half of the time where neighbours are alike.
Whole blocks of neighbours are nearly independent (the method of batch means). With K blocks of n_k tokens and
NLL y_k, the mean is the ratio r = sum y / sum n and its variance, by the delta method (Cochran, "Sampling
Techniques", 3rd ed., section 2.11),

    Var(r) = K/(K-1) * sum (y_k - r n_k)^2 / (sum n)^2.

Blocks are whole documents, side by side, where there are at least ``FEWEST_DOCUMENTS``, and else runs of
windows; at most ``MOST_BLOCKS``, so that they are long. The interval takes Student's t with K-1 degrees of
freedom. Where whole documents resemble each other, or one stream has only a few windows, it is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import NormalDist

import numpy as np

from ppl_eval.metrics.totals import FRACTION_BITS, NUM_LIMBS, FloatArray, from_limbs, to_fixed, to_limbs
from ppl_eval.protocols.base import IntArray

MOST_BLOCKS = 32
FEWEST_DOCUMENTS = 10
# An interval from fewer blocks says nothing.
FEWEST_BLOCKS = 5


def block_starts(num_windows: int, document_starts: IntArray) -> tuple[str, IntArray]:
    """Return where blocks begin among the windows of a run or domain, which are counted from 0.

    Args:
        num_windows: windows there are.
        document_starts: first window of each document that has one, ascending.

    Returns:
        What blocks are made of (``documents`` or ``windows``), and the first window of each block.
    """
    num_blocks = min(num_windows, MOST_BLOCKS)
    even = np.arange(num_blocks, dtype=np.int64) * num_windows // num_blocks
    if len(document_starts) < FEWEST_DOCUMENTS:
        return "windows", even
    if len(document_starts) <= MOST_BLOCKS:
        return "documents", document_starts
    # The document that begins at or after each even cut.
    following = np.searchsorted(document_starts, even)
    return "documents", np.unique(document_starts[np.minimum(following, len(document_starts) - 1)])


class Blocks:
    """NLL and tokens of each block: exact sums, which any number of ranks may share.

    Args:
        num_windows: windows of the run or domain.
        document_starts: first window of each of its documents that has one, ascending.
    """

    def __init__(self, num_windows: int, document_starts: IntArray) -> None:
        self.kind, self.starts = block_starts(num_windows, document_starts)
        self.nll_fixed = [0] * len(self.starts)
        self.num_tokens = [0] * len(self.starts)

    def add(self, window_B: IntArray, nll_sum_B: FloatArray, num_tokens_B: IntArray) -> None:
        """Add windows, by their number in the run or domain."""
        block_B = np.searchsorted(self.starts, window_B, side="right") - 1
        for block in np.unique(block_B):
            here = block_B == block
            self.nll_fixed[block] += to_fixed(nll_sum_B[here])
            self.num_tokens[block] += int(num_tokens_B[here].sum())

    def pack(self) -> IntArray:
        """Return all sums as one int64 vector, which may be added over ranks elementwise."""
        rows = [[*to_limbs(nll), n] for nll, n in zip(self.nll_fixed, self.num_tokens, strict=True)]
        return np.array(rows, dtype=np.int64).ravel()

    def unpack(self, vector: IntArray) -> None:
        """Take over a sum of ``pack`` vectors."""
        rows = vector.reshape(len(self.starts), NUM_LIMBS + 1)
        self.nll_fixed = [from_limbs(row[:-1].tolist()) for row in rows]
        self.num_tokens = [int(row[-1]) for row in rows]

    @property
    def num_blocks(self) -> int:
        """Blocks that have scored tokens."""
        return sum(n > 0 for n in self.num_tokens)

    def ce_loss_stderr(self) -> float | None:
        """Return the standard error of NLL per token, nats; None with fewer than two blocks."""
        if self.num_blocks < 2:
            return None
        all_tokens = sum(self.num_tokens)
        ratio = Fraction(sum(self.nll_fixed), all_tokens)
        residual_sq = sum(
            (nll - ratio * n) ** 2 for nll, n in zip(self.nll_fixed, self.num_tokens, strict=True) if n
        )
        variance = residual_sq * self.num_blocks / (self.num_blocks - 1) / all_tokens**2
        return float(variance / (1 << 2 * FRACTION_BITS)) ** 0.5

    def half_width_95(self) -> float | None:
        """Return half of the 95 % interval of NLL per token, nats; None for fewer than ``FEWEST_BLOCKS``."""
        stderr = self.ce_loss_stderr()
        if stderr is None or self.num_blocks < FEWEST_BLOCKS:
            return None
        return student_t(0.975, self.num_blocks - 1) * stderr


def joined(parts: Sequence[Blocks]) -> Blocks:
    """Return the blocks of several sets of documents as those of one set."""
    whole = Blocks(0, np.zeros(0, dtype=np.int64))
    kinds = sorted({blocks.kind for blocks in parts if blocks.num_blocks})
    whole.kind = " and ".join(kinds) or whole.kind
    whole.nll_fixed = [nll for blocks in parts for nll in blocks.nll_fixed]
    whole.num_tokens = [n for blocks in parts for n in blocks.num_tokens]
    return whole


def student_t(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t, good to 0.4 % from 4 degrees of freedom (Abramowitz and Stegun,
    26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))


def two_sided_p(t: float, degrees: int) -> float:
    """Return the probability of a value of Student's t at least as far from 0.

    With x = sqrt(degrees) tan(a), the density is proportional to cos(a)^(degrees - 1); both integrals are
    taken by Simpson's rule.
    """
    if math.isinf(t):
        return 0.0
    cut = math.atan(abs(t) / math.sqrt(degrees))

    def integral(low: float) -> float:
        angle = np.linspace(low, math.pi / 2, 4097)
        weight = np.full(4097, 2.0)
        weight[1::2], weight[[0, -1]] = 4.0, 1.0
        return float((weight * np.cos(angle) ** (degrees - 1)).sum()) * (math.pi / 2 - low)

    return min(1.0, integral(cut) / integral(0.0))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values for having asked several questions (Holm, 1979): the chance of even one false finding
    among them stays below the level. None stays None and is not counted.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    found: list[float | None] = [None] * len(p_values)
    asked = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    largest = 0.0
    for place, (value, index) in enumerate(asked):
        largest = max(largest, min(1.0, (len(asked) - place) * value))
        found[index] = largest
    return found
