"""Results as others print them: a table for a model card, and a results file in lm-eval's form."""

import json
import math
from collections.abc import Sequence
from typing import Any

from ppl_eval.reports.runs import Run

# lm-eval's names of our figures.
_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "perplexity")


def markdown(runs: Sequence[Run]) -> str:
    """Return a table of runs, with what was measured, for a model card."""
    lines = [
        "| model | data | protocol | tokens | perplexity | 95 % interval | bits per byte |",
        "|" + "---|" * 7,
    ]
    for run in runs:
        result = run.result
        ends = result.get("perplexity_interval_95")
        protocol = result["protocol"]
        cells = [
            run.name,
            result["dataset"].get("name", ""),
            f"{protocol['name']}, {protocol.get('max_seq_len')} tokens",
            f"{result['num_tokens']:,}",
            _figure(result["perplexity"]),
            "" if ends is None else f"{_figure(ends[0])} to {_figure(ends[1])}",
            _figure(result.get("bits_per_byte")),
        ]
        lines.append("| " + " | ".join(_escaped(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def lm_eval(runs: Sequence[Run]) -> str:
    """Return results as lm-eval's ``results_*.json`` holds them, one task a run.

    Raises:
        ValueError: if two runs have one name.
    """
    results: dict[str, Any] = {}
    for run in runs:
        found: dict[str, Any] = {"alias": run.name}
        for name in _METRICS:
            value = run.result.get(name)
            if value is not None:
                found[f"{name},none"] = math.inf if value == "Infinity" else value
                found[f"{name}_stderr,none"] = run.result.get(f"{name}_stderr", "N/A")
        results[run.name] = found
    samples = {
        run.name: {"original": run.result["num_documents"], "effective": run.result["num_documents"]}
        for run in runs
    }
    document = {
        "results": results,
        "n-shot": dict.fromkeys(results, 0),
        "higher_is_better": {name: dict.fromkeys(_METRICS, False) for name in results},
        "n-samples": samples,
        "versions": {run.name: run.result["schema"] for run in runs},
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _figure(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.5g}"


def _escaped(text: str) -> str:
    for character in "\\|<>`*_[]":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
