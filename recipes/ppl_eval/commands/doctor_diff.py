"""Why do two numbers differ? The recorded causes in order, then the windows that differ most."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ppl_eval.commands.doctor import Finding
from ppl_eval.results import baseline

# Fields of a result that change the number, in the order in which to look.
CAUSES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "NaN exclusions",
        ("num_excluded_windows", "coverage.excluded_tokens", "coverage.excluded_windows"),
        "the NLL of these windows is not finite: compare the windows that both scored (below)",
    ),
    ("plan", ("plan.max_windows", "plan.whole", "num_windows", "coverage"), "score the same windows"),
    ("tokens", ("num_tokens", "dataset.fingerprint"), "give both the same text, tokenizer and join"),
    ("BOS", ("protocol.bos", "protocol.bos_tokens", "protocol.prefix_token"), "use the same protocol.bos"),
    ("protocol", ("protocol",), "use the same protocol and window length"),
    ("checkpoint", ("model.checkpoint", "model.component", "model.arguments"), "score the same weights"),
    ("quantised layers", ("quantizer",), "quantise the same layers in the same way"),
    ("dtype", ("dtype",), "use the same dtype; float32 shows what rounding costs"),
    ("kernels", ("softmax", "compile", "device", "versions.cpu"), "run both on one kind of machine"),
    (
        "batches",
        ("plan.batch_size", "plan.windows_in_parts", "max_logits_mib"),
        "use the same batch size: kernels see other shapes",
    ),
    ("parallel", ("parallel.tp", "parallel.cp"), "tensor and context parallelism reorder arithmetic"),
    ("precision", ("aggregation",), "aggregation.precision=exact has no drift"),
    ("versions", ("versions",), "install the same versions"),
)


def explain(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Finding]:
    """Return what differs between two results, likeliest cause first; each field once."""
    findings = [
        Finding(name, str(first.get(name)), str(second.get(name)))
        for name in ("perplexity", "ce_loss", "nll_sum_hex", "num_tokens")
    ]
    seen: set[str] = set()
    for cause, fields, remedy in CAUSES:
        for line in baseline.differences(first, second, fields):
            name, _, values = line.partition(": ")
            if name not in seen:
                seen.add(name)
                here, _, there = values.partition(" here, ")
                findings.append(
                    Finding(f"{cause}: {name}", here, there.removesuffix(" in the baseline"), remedy)
                )
    return findings


def windows_that_differ(first: Path, second: Path, most: int = 10) -> list[Finding]:
    """Return the windows whose NLL differs most, from ``windows.parquet`` of both folders.

    Args:
        first: output folder of a run with ``per_window: true``.
        second: the other's.
        most: how many.
    """
    columns = ["document", "start", "score_start", "stop", "num_tokens", "nll_sum"]
    tables = []
    for folder in (first, second):
        path = folder / "windows.parquet"
        if not path.is_file():
            return [
                Finding("windows", "", f"{path} is not there: per_window=true in both runs shows windows")
            ]
        tables.append(pq.read_table(path, columns=columns).to_pydict())
    keys = [list(zip(*(table[name] for name in columns[:4]), strict=True)) for table in tables]
    # Without windows that nothing was scored in: left out, or all masked.
    nll = [
        {
            window: nll_sum
            for window, nll_sum, num_tokens in zip(key, table["nll_sum"], table["num_tokens"], strict=True)
            if num_tokens
        }
        for key, table in zip(keys, tables, strict=True)
    ]
    shared = [key for key in nll[0] if key in nll[1]]
    delta = np.array([nll[1][key] - nll[0][key] for key in shared])
    findings = [Finding("windows", f"{len(nll[0]):,}", f"{len(nll[1]):,}; {len(shared):,} in both")]
    for index in np.argsort(-np.abs(delta), kind="stable")[:most]:
        if delta[index]:
            document, start, score_start, stop = shared[index]
            where = f"document {document}, tokens {score_start} to {stop} (seen from {start})"
            findings.append(Finding(where, f"{nll[0][shared[index]]:.6f}", f"{delta[index]:+.6f} nats"))
    if len(shared) and not delta.any():
        findings.append(Finding("windows in both", "", "the same NLL, bit for bit"))
    return findings
