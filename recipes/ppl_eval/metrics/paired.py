"""Two runs over the same windows, window by window: how far apart are they, and is that more than noise?

Most of what makes one window harder than another is the same for both runs and cancels in the difference,
so a paired difference is known far better than either perplexity.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

WINDOWS = "windows.parquet"


def against_baseline(
    result: Mapping[str, Any], baseline: Mapping[str, Any], ours: Path, theirs: Path
) -> dict[str, Any]:
    """Return the difference between a result and a comparable baseline, for the result file.

    Args:
        result: this run's.
        baseline: the other's; over the same windows.
        ours: this run's output folder.
        theirs: the folder of the baseline.

    Returns:
        ``perplexity_ratio`` and ``ce_loss_difference`` (nats per token, ours less theirs), each with its
        standard error; the errors are None unless both runs wrote windows.parquet (``per_window: true``).
    """
    difference = result["ce_loss"] - baseline["ce_loss"]
    stderr, num_windows = None, None
    a, b = _windows(ours, result), _windows(theirs, baseline)
    if a is not None and b is not None and np.array_equal(a[0], b[0]):
        difference, stderr = paired_difference(a[1] - b[1], a[0])
        num_windows = len(a[0])
    ratio = math.exp(min(difference, 700.0))
    return {
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": None if stderr is None else ratio * stderr,
        "ce_loss_difference": difference,
        "ce_loss_difference_stderr": stderr,
        "num_windows": num_windows,
    }


def _windows(
    folder: Path, result: Mapping[str, Any]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Return tokens and NLL of each window in the plan's order; None if there is no table of this result."""
    if not (folder / WINDOWS).is_file():
        return None
    columns = pq.read_table(folder / WINDOWS, columns=["num_tokens", "nll_sum"])
    num_tokens_W, nll_W = (column.to_numpy().astype(np.float64) for column in columns.itercolumns())
    # A table that an earlier run left there would compare something else.
    same = num_tokens_W.sum() == result["num_tokens"] and math.isclose(
        math.fsum(nll_W), result["nll_sum"], rel_tol=1e-9
    )
    return (num_tokens_W, nll_W) if same else None


def paired_difference(
    nll_difference_W: npt.NDArray[np.float64], num_tokens_W: npt.NDArray[np.float64]
) -> tuple[float, float | None]:
    """Mean NLL difference per token and its standard error, windows being what varies independently.

    The estimator of a ratio of sums: r = sum d_w / sum n_w, var(r) = W / (W - 1) * sum (d_w - r n_w)^2 /
    (sum n_w)^2 (Cochran, Sampling Techniques, 1977, section 6.4, without the finite-population factor).

    Args:
        nll_difference_W: difference of each window's NLL, nats.
        num_tokens_W: scored tokens of each window.

    Returns:
        Nats per token; the error is None for a single window.
    """
    total_tokens = math.fsum(num_tokens_W)
    mean = math.fsum(nll_difference_W) / total_tokens
    num_windows = len(num_tokens_W)
    if num_windows < 2:
        return mean, None
    squares = math.fsum((nll_difference_W - mean * num_tokens_W) ** 2)
    return mean, math.sqrt(squares * num_windows / (num_windows - 1)) / total_tokens


def sentence(found: Mapping[str, Any]) -> str:
    """Describe the comparison in a line."""
    if found["ce_loss_difference_stderr"] is None:
        return (
            f"perplexity is {found['perplexity_ratio']:.5f} times the baseline's; how sure that is needs"
            " per_window=true in both runs"
        )
    return (
        f"perplexity is {found['perplexity_ratio']:.5f} ± {found['perplexity_ratio_stderr']:.5f} times the"
        f" baseline's (paired over {found['num_windows']} windows: {found['ce_loss_difference']:+.6f} ±"
        f" {found['ce_loss_difference_stderr']:.6f} nats per token)"
    )
