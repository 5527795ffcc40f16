"""NLL by context length: what the runs of ``protocol.max_seq_len: [512, 1024, ...]`` found, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_eval.config.files import write_json
from ppl_eval.results import excluded

NAME = "lengths.json"
_FIGURES = (
    "ce_loss",
    "ce_loss_stderr",
    "perplexity",
    "perplexity_interval_95",
    "bits_per_byte",
    "nll_sum_hex",
    "num_tokens",
    "num_windows",
    "num_excluded_tokens",
    "num_excluded_windows",
)


def write_lengths(output_dirs: Sequence[str]) -> str:
    """Gather the results of all lengths into ``lengths.json``, in the folder above theirs.

    Args:
        output_dirs: of the lengths, in their order.

    Returns:
        The table for the screen.
    """
    rows: list[dict[str, Any]] = []
    for folder in map(Path, output_dirs):
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        row = {"max_seq_len": result["protocol"]["max_seq_len"], "folder": folder.name}
        rows.append(row | {name: result[name] for name in _FIGURES})
    path = Path(output_dirs[0]).parent / NAME
    write_json(path, {"lengths": rows})
    lines = [f"  {'max_seq_len':>11}  {'nats per token':>14}  {'stderr':>9}  {'perplexity':>12}  tokens"]
    for row in rows:
        stderr = "" if row["ce_loss_stderr"] is None else f"{row['ce_loss_stderr']:.6f}"
        perplexity = row["perplexity"]
        perplexity = perplexity if isinstance(perplexity, str) else f"{perplexity:.6f}"
        lines.append(
            f"  {row['max_seq_len']:>11}  {row['ce_loss']:>14.9f}  {stderr:>9}  {perplexity:>12}"
            f"  {row['num_tokens']:,}" + (f", left out: {text}" if (text := excluded.summary(row)) else "")
        )
    return "\n".join([*lines, f"  written to {path}"])
