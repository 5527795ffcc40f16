"""Two runs, window by window: how far apart are they over the windows that both scored, and is that more than
noise?

Most of what makes one window harder than another is the same for both runs and cancels in the difference,
so a paired difference is known far better than either perplexity.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from ppl_eval.metrics.standard_error import Blocks
from ppl_eval.protocols.base import IntArray

WINDOWS = "windows.parquet"
_COLUMNS = ["content", "document", "num_tokens", "nll_sum"]
FloatArray = npt.NDArray[np.float64]


def against_baseline(
    result: Mapping[str, Any], baseline: Mapping[str, Any], ours: Path, theirs: Path, *, same_windows: bool
) -> dict[str, Any] | None:
    """Return the difference between a result and a baseline of the same protocol, for the result file.

    Args:
        result: this run's.
        baseline: the other's.
        ours: this run's output folder.
        theirs: the folder of the baseline.
        same_windows: whether both scored the same tokens.

    Returns:
        ``perplexity_ratio`` and ``ce_loss_difference`` (nats per token, ours less theirs), each with its
        standard error, over the ``num_windows`` windows with scored tokens that both have; whether they have
        the same bits (``same_bits``), and both means over them (``ce_loss``, ``baseline_ce_loss``). The
        errors are None unless both runs wrote windows.parquet (``per_window: true``), and None too with fewer
        than two blocks. None where without these tables nothing can be said, or no window is shared.
    """
    a, b = _windows(ours, result), _windows(theirs, baseline)
    if a is None or b is None:
        if not same_windows:
            return None
        found = {
            "ce_loss": result["ce_loss"],
            "baseline_ce_loss": baseline["ce_loss"],
            "same_bits": result.get("nll_sum_hex") == baseline.get("nll_sum_hex"),
        }
        return _figures(found, (result["ce_loss"] - baseline["ce_loss"], None), None)
    here, there = shared_windows(a["content"], b["content"])
    if not len(here):
        return None
    num_tokens_W, nll_W, other_W = a["num_tokens"][here], a["nll_sum"][here], b["nll_sum"][there]
    total_tokens = int(num_tokens_W.sum())
    found = {
        "ce_loss": math.fsum(nll_W) / total_tokens,
        "baseline_ce_loss": math.fsum(other_W) / total_tokens,
        "same_bits": bool((nll_W == other_W).all()),
    }
    paired = paired_difference(nll_W - other_W, num_tokens_W, a["document"][here])
    return _figures(found, paired, len(here)) | {
        "num_windows_here": len(a["content"]),
        "num_windows_in_baseline": len(b["content"]),
    }


def _figures(
    found: dict[str, Any], paired: tuple[float, float | None], num_windows: int | None
) -> dict[str, Any]:
    difference, stderr = paired
    ratio = math.exp(min(difference, 700.0))
    return {
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": None if stderr is None else ratio * stderr,
        "ce_loss_difference": difference,
        "ce_loss_difference_stderr": stderr,
        "num_windows": num_windows,
        **found,
    }


def _windows(folder: Path, result: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]] | None:
    """Return the windows with scored tokens in the plan's order; None if there is no table of this result."""
    path = folder / WINDOWS
    if not path.is_file() or not set(_COLUMNS) <= set(pq.read_schema(path).names):
        return None
    table = pq.read_table(path, columns=_COLUMNS)
    columns = {name: table[name].to_numpy() for name in _COLUMNS}
    # A table that an earlier run left there would compare something else.
    same = columns["num_tokens"].sum() == result["num_tokens"] and math.isclose(
        math.fsum(columns["nll_sum"]), result["nll_sum"], rel_tol=1e-9
    )
    scored_W = columns["num_tokens"] > 0
    return {name: values[scored_W] for name, values in columns.items()} if same else None


def shared_windows(content_A: IntArray, content_B: IntArray) -> tuple[IntArray, IntArray]:
    """Match windows of equal content; where several are equal, the first with the first.

    Returns:
        Indices into both, ascending in the first.
    """
    there = {key: index for index, key in enumerate(_occurrences(content_B))}
    pairs = [(index, there[key]) for index, key in enumerate(_occurrences(content_A)) if key in there]
    here_K, there_K = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return here_K, there_K


def _occurrences(content_W: IntArray) -> Iterator[tuple[int, int]]:
    """Walk the windows as their content and how many equal ones came before."""
    seen: dict[int, int] = {}
    for content in content_W.tolist():
        seen[content] = seen.get(content, -1) + 1
        yield content, seen[content]


def paired_difference(
    nll_difference_W: FloatArray, num_tokens_W: IntArray, document_W: IntArray | None = None
) -> tuple[float, float | None]:
    """Mean NLL difference per token and its standard error, from blocks of neighbouring windows.

    A ratio of sums, its variance as in ``standard_error``: neighbouring windows resemble each other in their
    differences too. Windows without scored tokens say nothing and do not count.

    Args:
        nll_difference_W: difference of each window's NLL, nats.
        num_tokens_W: scored tokens of each window.
        document_W: document of each, ascending; None for one document.

    Returns:
        Nats per token; the error is None with fewer than two blocks.
    """
    blocks, mean = paired_blocks(nll_difference_W, num_tokens_W, document_W)
    return mean, blocks.ce_loss_stderr()


def paired_blocks(
    difference_W: FloatArray, size_W: IntArray, document_W: IntArray | None = None
) -> tuple[Blocks, float]:
    """Group differences to blocks of neighbours, and return these with the ratio of the sums.

    Args:
        difference_W: of each window or document.
        size_W: what its difference is divided by: tokens, or bytes; those with none do not count.
        document_W: document of each, ascending; None for one document.
    """
    counts_W = size_W > 0
    difference_W, size_W = difference_W[counts_W], size_W[counts_W].astype(np.int64)
    starts = np.zeros(1, dtype=np.int64)
    if document_W is not None:
        starts = np.append(starts, 1 + np.flatnonzero(np.diff(document_W[counts_W])))
    blocks = Blocks(len(size_W), starts)
    blocks.add(np.arange(len(size_W)), difference_W, size_W)
    return blocks, math.fsum(difference_W) / int(size_W.sum())


def sentence(found: Mapping[str, Any]) -> str:
    """Describe the comparison in a line."""
    ratio = f"perplexity is {found['perplexity_ratio']:.5f}"
    if found["num_windows"] is None:
        return f"{ratio} times the baseline's; how sure that is needs per_window=true in both runs"
    over = f"{found['num_windows']} windows"
    if not found["num_windows"] == found["num_windows_here"] == found["num_windows_in_baseline"]:
        here, there = found["num_windows_here"], found["num_windows_in_baseline"]
        over += f" that both share of {here} here and {there} in the baseline"
    if found["ce_loss_difference_stderr"] is None:
        return f"{ratio} times the baseline's (paired over {over}, too few for a standard error)"
    return (
        f"{ratio} ± {found['perplexity_ratio_stderr']:.5f} times the baseline's (paired over {over}:"
        f" {found['ce_loss_difference']:+.6f} ± {found['ce_loss_difference_stderr']:.6f} nats per token)"
    )
