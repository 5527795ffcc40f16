"""The result of a run: a JSON file for programs, a table for people."""

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_eval.results import excluded
from ppl_eval.results.domain_table import domain_lines

SCHEMA = 1


def check_output_dir(path: Path) -> Path:
    """Make the folder and see that a file can be written there, before any work is done.

    Raises:
        ValueError: if not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"output_dir {path} cannot be written: {error.strerror}") from error
    return path


# Figures of single protocols, and of runs with several domains.
_SOME_RUNS_ONLY = (
    "perplexity_exact_weighting",
    "perplexity_stderr_llama_cpp",
    "adjusted_perplexity",
    "macro_perplexity",
)


def table(result: Mapping[str, Any], *, with_memory: bool = False) -> str:
    """Format the result for a screen.

    Args:
        result: as ``results.build`` made it.
        with_memory: show the peak memory of the ranks too.
    """
    timing, parallel, coverage = result["timing"], result["parallel"], result["coverage"]
    stderr = result["perplexity_stderr"]
    rows = [
        ("perplexity", _number(result["perplexity"]) + ("" if stderr is None else f" ± {_number(stderr)}")),
        ("95 % interval", _interval(result["perplexity_interval_95"])),
        *((name.replace("_", " "), _number(result.get(name))) for name in _SOME_RUNS_ONLY),
        ("ce_loss", f"{result['ce_loss']:.9g} nats per token"),
        ("nll_sum", f"{result['nll_sum']!r} nats ({result['nll_sum_hex']})"),
        ("tokens scored", f"{result['num_tokens']:,} of {coverage['expected_tokens']:,} expected, each once"),
        ("left out", excluded.summary(result)),
        ("windows", f"{result['num_windows']:,} from {result['num_documents']:,} documents"),
        ("bits per byte", _number(result["bits_per_byte"])),
        ("byte perplexity", _number(result["byte_perplexity"])),
        ("word perplexity", _number(result["word_perplexity"])),
        ("top-1 accuracy", _number(result["top1_accuracy"])),
        *_comparison_rows(result.get("comparison")),
        ("protocol", _protocol(result["protocol"])),
        (
            "model",
            (
                f"{result['model']['component']}, {result['model']['num_parameters']:,} parameters,"
                f" {result['dtype']}"
            ),
        ),
        ("quantizer", _quantizer(result["quantizer"])),
        ("processes", f"{parallel['world_size']} on {parallel['num_nodes']} node(s)"),
        ("speed", f"{timing['tokens_per_second']:,.0f} tokens/s, {timing['score_seconds']:.1f} s of scoring"),
    ]
    if with_memory:
        peak = timing["per_rank"]["peak_memory_bytes"]
        rows.append(("peak memory", f"{peak['max'] / 2**20:,.0f} MiB on the rank with most"))
    rows = [(name, value) for name, value in rows if value]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    lines += [f"  {line}" for line in domain_lines(result)]
    lines += [f"  note: {note}" for note in result["notes"]]
    rule = "-" * min(100, max(len(line) for line in lines))
    return "\n".join([rule, *lines, rule])


def _comparison_rows(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if not found:
        return []
    stderr, interval = found["kl_stderr"], found["perplexity_ratio_interval_95"]
    rows = [
        (
            "reference",
            f"perplexity {_number(found['reference_perplexity'])}; ratio {_number(found['perplexity_ratio'])}"
            + (f" ({_interval(interval)})" if interval else ""),
        ),
        (
            "KL divergence",
            f"{_number(found['kl_mean'])}{'' if stderr is None else f' ± {_number(stderr)}'} nats per token",
        ),
        (
            "same top token",
            f"{found['same_top']:.3%}; RMS change of probability {found['probability_change_rms']:.3%}",
        ),
    ]
    if percentiles := found.get("kl_percentiles"):
        listed = ", ".join(f"{name} %: {_number(value)}" for name, value in percentiles.items())
        rows.insert(2, ("KL percentiles", listed))
    return rows


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6f}" if 1e-4 < abs(value) < 1e7 else f"{value:.6g}"


def _interval(interval: list[float | str] | None) -> str:
    return "" if interval is None else f"{_number(interval[0])} to {_number(interval[1])}"


def _protocol(protocol: Mapping[str, Any]) -> str:
    settings = ", ".join(
        f"{key}={value!r}" for key, value in protocol.items() if key not in ("name", "bos_tokens")
    )
    return f"{protocol['name']} ({settings})"


def _quantizer(quantizer: Mapping[str, Any] | None) -> str:
    if quantizer is None:
        return ""
    return (
        f"{quantizer['component']}: {quantizer['num_quantized']} linear layers quantised,"
        f" {quantizer['num_skipped']} left as they were"
    )


def spread(values: list[float]) -> dict[str, float]:
    """Return the smallest, mean and largest of a figure over ranks."""
    return {"min": min(values), "mean": math.fsum(values) / len(values), "max": max(values)}
