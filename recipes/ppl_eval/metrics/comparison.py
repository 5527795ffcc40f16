"""A model beside a reference on the same tokens: what is kept of each window, its exact sums, its figures.

With p and q the reference's and the model's distributions over the vocabulary before a scored token, and P
and Q their probabilities of that token:

    KL divergence    KL(p || q) = sum over v of p_v (ln p_v - ln q_v), nats, and the reverse KL(q || p)
    change of p      Q - P
    PPL ratio        exp(mean of ln P - ln Q): the ratio of the perplexities
    same top         whether the most likely token is the same; else the rank that q gives to p's

the figures of ``llama-perplexity --kl-divergence``. Their standard errors are those of ``standard_error``:
from blocks of neighbouring windows, where llama-perplexity counts tokens as independent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.metrics.standard_error import Blocks
from ppl_eval.metrics.totals import (
    FRACTION_BITS,
    NUM_LIMBS,
    NUM_VALUE_LIMBS,
    FloatArray,
    IntArray,
    TokenComparison,
    fixed_limbs,
    fixed_to_float,
    from_limbs,
    join_value_limbs,
    to_fixed,
    to_limbs,
)
from ppl_eval.protocols.base import exp_or_infinity

# What is summed of each window, and of each position bucket.
SUMS = ("reference_nll", "kl", "kl_sq", "reverse_kl", "change", "change_sq")
COUNTS = ("same_top", "top_rank")
BUCKET_SUMS, BUCKET_COUNTS = ("reference_nll", "kl", "change_sq"), ("same_top",)


def change_of_probability(nll_N: npt.NDArray[Any], reference_nll_N: npt.NDArray[Any]) -> FloatArray:
    """Return how much more likely the model finds each token than the reference; float64."""
    nll_N, reference_nll_N = nll_N.astype(np.float64), reference_nll_N.astype(np.float64)
    return np.asarray(np.exp(-nll_N) - np.exp(-reference_nll_N))


def record_fields(num_buckets: int) -> list[tuple[Any, ...]]:
    """Return the fields that a comparison adds to a window's record, for a structured dtype: sums in float64
    (nats; nats^2 for squares), the largest KL, counts in int64, and the sums of position buckets in limbs."""
    fields: list[tuple[Any, ...]] = [(f"{name}_sum", "<f8") for name in SUMS]
    fields += [("kl_max", "<f8")] + [(f"{name}_count", "<i8") for name in COUNTS]
    if num_buckets:
        fields += [(f"bucket_{name}", "<i8", (num_buckets, NUM_VALUE_LIMBS)) for name in BUCKET_SUMS]
        fields += [(f"bucket_{name}", "<i8", (num_buckets,)) for name in BUCKET_COUNTS]
    return fields


def is_compared(records: npt.NDArray[np.void]) -> bool:
    """Return whether records hold a comparison."""
    return "kl_sum" in (records.dtype.names or ())


def fill_records(
    records: npt.NDArray[np.void],
    nll_BT: FloatArray,
    scored_BT: npt.NDArray[np.bool_],
    found: TokenComparison,
    bucket_width: int,
) -> None:
    """Write a batch's comparison into its records.

    Args:
        records: of the batch's windows.
        nll_BT: NLL of each target, 0 where none is scored; float64.
        scored_BT: where targets are scored.
        found: of the scored targets.
        bucket_width: positions of a bucket.
    """
    change_N = change_of_probability(nll_BT[scored_BT], found.reference_nll_N)
    kl_N = found.kl_N.astype(np.float64)
    values = {
        "reference_nll": found.reference_nll_N,
        "kl": kl_N,
        "kl_sq": np.square(kl_N),
        "reverse_kl": found.reverse_kl_N,
        "change": change_N,
        "change_sq": np.square(change_N),
        "same_top": found.top_rank_N == 1,
        "top_rank": found.top_rank_N,
    }
    placed: dict[str, npt.NDArray[Any]] = {}
    for names, kind, suffix in ((SUMS, np.float64, "sum"), (COUNTS, np.int64, "count")):
        for name in names:
            placed[name] = np.zeros(scored_BT.shape, dtype=kind)
            placed[name][scored_BT] = values[name]
            records[f"{name}_{suffix}"] = placed[name].sum(axis=1)
    records["kl_max"] = placed["kl"].max(axis=1, initial=0.0)
    num_buckets = records.dtype["bucket_kl"].shape[0] if "bucket_kl" in (records.dtype.names or ()) else 0
    for index in range(num_buckets):
        columns = slice(index * bucket_width, (index + 1) * bucket_width)
        for name in BUCKET_SUMS:
            for limb, values_BT in enumerate(fixed_limbs(placed[name][:, columns])):
                records[f"bucket_{name}"][:, index, limb] = values_BT.sum(axis=1)
        for name in BUCKET_COUNTS:
            records[f"bucket_{name}"][:, index] = placed[name][:, columns].sum(axis=1)


class ComparedSums:
    """Exact sums of a comparison over a set of windows; integers, those of ``SUMS`` in units of 2^-96.

    Args:
        num_windows: windows of the set.
        document_starts: first window of each of its documents that has one, ascending.

    Attributes:
        sums: by name.
        kl_blocks: KL and tokens of blocks of windows.
        difference_blocks: NLL less that of the reference, likewise.
    """

    def __init__(self, num_windows: int, document_starts: IntArray) -> None:
        self.sums = dict.fromkeys(SUMS + COUNTS, 0)
        self.kl_blocks = Blocks(num_windows, document_starts)
        self.difference_blocks = Blocks(num_windows, document_starts)

    def add(self, records: npt.NDArray[np.void], window_B: IntArray) -> None:
        """Add windows, by their number in the set."""
        for name in SUMS:
            self.sums[name] += to_fixed(records[f"{name}_sum"])
        for name in COUNTS:
            self.sums[name] += int(records[f"{name}_count"].sum())
        tokens_B = records["num_tokens"]
        self.kl_blocks.add(window_B, records["kl_sum"], tokens_B)
        self.difference_blocks.add(window_B, records["nll_sum"], tokens_B)
        self.difference_blocks.add(window_B, -records["reference_nll_sum"], np.zeros_like(tokens_B))

    def pack(self) -> IntArray:
        """Return all sums as one int64 vector, which may be added over ranks elementwise."""
        limbs = [limb for value in self.sums.values() for limb in to_limbs(value)]
        blocks = [self.kl_blocks.pack(), self.difference_blocks.pack()]
        return np.concatenate([np.array(limbs, dtype=np.int64), *blocks])

    def unpack(self, vector: IntArray) -> None:
        """Take over a sum of ``pack`` vectors."""
        own, blocks = np.split(vector, [NUM_LIMBS * len(self.sums)])
        for name, limbs in zip(self.sums, own.reshape(-1, NUM_LIMBS), strict=True):
            self.sums[name] = from_limbs(limbs.tolist())
        first, second = np.split(blocks, 2)
        self.kl_blocks.unpack(first)
        self.difference_blocks.unpack(second)


class ComparedBucket:
    """Sums of a comparison over the targets of a position bucket."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(BUCKET_SUMS + BUCKET_COUNTS, 0)

    def add(self, records: npt.NDArray[np.void], index: int) -> None:
        """Add bucket ``index`` of windows."""
        for name in BUCKET_SUMS:
            limbs = records[f"bucket_{name}"][:, index].sum(axis=0, dtype=np.int64)
            self.sums[name] += join_value_limbs(limbs.tolist())
        for name in BUCKET_COUNTS:
            self.sums[name] += int(records[f"bucket_{name}"][:, index].sum())

    def pack(self) -> IntArray:
        """Return all sums as one int64 vector, which may be added over ranks elementwise."""
        return np.array([limb for value in self.sums.values() for limb in to_limbs(value)], dtype=np.int64)

    def unpack(self, vector: IntArray) -> None:
        """Take over a sum of ``pack`` vectors."""
        for name, limbs in zip(self.sums, vector.reshape(-1, NUM_LIMBS), strict=True):
            self.sums[name] = from_limbs(limbs.tolist())


def figures(compared: ComparedSums, nll_fixed: int, num_tokens: int) -> dict[str, Any]:
    """Return the figures of a set of windows, for ``comparison`` in the result.

    Args:
        compared: their sums.
        nll_fixed: the model's NLL over them, in units of 2^-96 nats.
        num_tokens: scored tokens.
    """
    if not num_tokens:
        return {}
    mean = {name: compared.sums[name] / (num_tokens << FRACTION_BITS) for name in SUMS}
    kl_sum = fixed_to_float(compared.sums["kl"])
    reference_sum = fixed_to_float(compared.sums["reference_nll"])
    share = compared.sums["same_top"] / num_tokens
    return {
        "reference_perplexity": _exp(mean["reference_nll"]),
        "reference_ce_loss": mean["reference_nll"],
        "reference_nll_sum": reference_sum,
        "reference_nll_sum_hex": reference_sum.hex(),
        **ratio(compared, nll_fixed, num_tokens),
        "kl_mean": mean["kl"],
        "kl_stderr": compared.kl_blocks.ce_loss_stderr(),
        "kl_interval_95": _interval(mean["kl"], compared.kl_blocks.half_width_95()),
        "kl_sum": kl_sum,
        "kl_sum_hex": kl_sum.hex(),
        "kl_stderr_of_independent_tokens": _independent(mean["kl"], mean["kl_sq"], num_tokens),
        "reverse_kl_mean": mean["reverse_kl"],
        "probability_change_mean": mean["change"],
        "probability_change_rms": math.sqrt(mean["change_sq"]),
        "same_top": share,
        "top_rank_mean": compared.sums["top_rank"] / num_tokens,
    }


def bucket_figures(bucket: ComparedBucket, nll_fixed: int, num_tokens: int) -> dict[str, Any]:
    """Return the figures of a position bucket."""
    if not num_tokens:
        return {}
    mean = {name: bucket.sums[name] / (num_tokens << FRACTION_BITS) for name in BUCKET_SUMS}
    difference = (nll_fixed - bucket.sums["reference_nll"]) / (num_tokens << FRACTION_BITS)
    return {
        "kl_mean": mean["kl"],
        "perplexity_ratio": _exp(difference),
        "probability_change_rms": math.sqrt(mean["change_sq"]),
        "same_top": bucket.sums["same_top"] / num_tokens,
    }


def ratio(compared: ComparedSums, nll_fixed: int, num_tokens: int) -> dict[str, Any]:
    """Return the ratio of the perplexities with what is known of its uncertainty, window by window paired."""
    difference = (nll_fixed - compared.sums["reference_nll"]) / (num_tokens << FRACTION_BITS)
    stderr = compared.difference_blocks.ce_loss_stderr()
    interval = _interval(difference, compared.difference_blocks.half_width_95())
    return {
        "ce_loss_difference": difference,
        "ce_loss_difference_stderr": stderr,
        "perplexity_ratio": _exp(difference),
        "perplexity_ratio_interval_95": None if interval is None else [_exp(value) for value in interval],
    }


def _independent(mean: float, mean_sq: float, num_tokens: int) -> float | None:
    """Return the standard error that llama-perplexity prints, which takes tokens for independent."""
    if num_tokens < 2:
        return None
    return math.sqrt(max(0.0, mean_sq - mean * mean) / (num_tokens - 1))


def _interval(middle: float, half_width: float | None) -> list[float] | None:
    return None if half_width is None else [middle - half_width, middle + half_width]


def _exp(value: float) -> float | str:
    found = exp_or_infinity(value)
    return "Infinity" if math.isinf(found) else found
