"""The report: one HTML file that needs nothing beside it."""

import importlib.util
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ppl_eval.config.files import whole_file
from ppl_eval.reports.compare import compare_runs
from ppl_eval.reports.runs import Run, per_token, read_runs
from ppl_eval.reports.texts import token_groups

_SHOWN_WINDOWS, _SHOWN_TOKENS = 5, 600
# A token of this NLL has the strongest colour.
_HOT = 8.0
NEEDS = "the report needs matplotlib: pip install 'distributed_ppl_eval[report]'"


def check_installed() -> None:
    """Find out whether a report can be drawn.

    Raises:
        ValueError: if not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(NEEDS)


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the report of runs, the first of which is the base that the others are compared with."""
    text = render(runs)
    with whole_file(path) as file:
        file.write(text)


def write_report_of(output_dir: str) -> Path:
    """Write ``report.html`` of a run that has just finished, beside its result; return its path."""
    path = Path(output_dir) / "report.html"
    write_report(read_runs([path.parent]), path)
    return path


def render(runs: Sequence[Run]) -> str:
    """Return the report as HTML.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    check_installed()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = _figure
    template = environment.from_string(
        files("ppl_eval.reports").joinpath("report.html.j2").read_text("utf-8")
    )
    compared = compare_runs(runs[0], runs[1:]) if len(runs) > 1 else None
    return template.render(
        runs=[_section(run) for run in runs],
        compared=compared,
        comparison_plots=_comparison_plots(runs, compared),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _section(run: Run) -> dict[str, Any]:
    best, worst = _windows(run)
    return {
        "name": run.name,
        "result": run.result,
        "plots": _plots(run),
        "window_groups": [("Worst windows", worst), ("Best windows", best)],
        "command": " ".join(run.result.get("run", {}).get("command", [])),
    }


def _figure(value: Any, digits: int = 6) -> str:
    if value is None:
        return "–"
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:,.{digits}g}"
    )


def _plots(run: Run) -> list[tuple[str, Markup, str]]:
    from ppl_eval.reports import plots

    result, found = run.result, []
    if result.get("positions"):
        note = "What the first tokens of a window cost, and whether a long context is used."
        found.append(("NLL by position", plots.positions({run.name: result["positions"]}), note))
    if domains := result.get("domains"):
        rows = [
            (name, part["ce_loss"], _loss_interval(part))
            for name, part in domains.items()
            if part["num_tokens"]
        ]
        note = "With 95 % intervals, where there are five blocks of windows or more."
        found.append(("Domains", plots.bars(rows, "NLL, nats per token", "domains"), note))
    for name, columns in (("documents", run.documents), ("windows", run.windows)):
        if columns is not None and len(columns["nll_sum"]) > 1:
            picture = plots.histogram(per_token(columns), f"NLL per token of {name}", name)
            found.append((f"Histogram of {name}", picture, f"{len(columns['nll_sum']):,} {name}."))
    return found


def _loss_interval(part: dict[str, Any]) -> list[float] | None:
    ends = part.get("perplexity_interval_95")
    return None if ends is None or any(isinstance(end, str) for end in ends) else np.log(ends).tolist()


def _windows(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the windows with the lowest and the highest NLL per token, with their tokens where known."""
    if run.windows is None:
        return [], []
    loss_W = per_token(run.windows)
    order = np.argsort(loss_W, kind="stable")
    count = min(_SHOWN_WINDOWS, len(order) // 2)
    chosen = (order[:count], order[::-1][:count])
    tokens = run.tokens_of([int(run.windows["window_id"][i]) for part in chosen for i in part])
    best, worst = ([_window(run, int(i), float(loss_W[i]), tokens) for i in part] for part in chosen)
    return best, worst


def _window(run: Run, index: int, loss: float, tokens: dict[int, pa.Table]) -> dict[str, Any]:
    assert run.windows is not None
    own = {name: run.windows[name][index] for name in ("window_id", "document", "domain", "num_tokens")}
    table = tokens.get(int(own["window_id"]))
    groups = [] if table is None else token_groups(run, table.slice(0, _SHOWN_TOKENS))
    cut = 0 if table is None else max(0, len(table) - _SHOWN_TOKENS)
    return {**own, "ce_loss": loss, "tokens": [_token(text, rows) for text, rows in groups], "num_cut": cut}


def _token(text: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    nll = sum(row["nll"] for row in rows)
    lines = [f"NLL {row['nll']:.3f} · rank {row['rank']:,}" for row in rows]
    if "kl" in rows[0]:
        lines = [f"{line} · KL {row['kl']:.4f}" for line, row in zip(lines, rows, strict=True)]
    heat = min(1.0, nll / len(rows) / _HOT)
    return {"text": text, "hover": f"{text!r}\n" + "\n".join(lines), "heat": round(10 * heat)}


def _comparison_plots(runs: Sequence[Run], compared: dict[str, Any] | None) -> list[tuple[str, Markup, str]]:
    from ppl_eval.reports import plots

    found = []
    entries = [] if compared is None else compared["comparisons"]
    rows = [
        (entry["name"], entry["perplexity_ratio"], entry["perplexity_ratio_interval_95"])
        for entry in entries
        if isinstance(entry.get("perplexity_ratio"), float)
    ]
    if rows:
        note = "Paired window by window, with 95 % intervals. The line is the base."
        found.append(("Perplexity against the base", plots.ratios(rows, runs[0].name), note))
    kl = {run.name: (run.result.get("comparison") or {}).get("kl_percentiles") for run in runs}
    known = {name: values for name, values in kl.items() if values}
    if known:
        found.append(
            ("KL divergence", plots.percentiles(known), "Of each token, from the reference of the run.")
        )
    return found
