"""The table of many results, with differences to one of them, as Parquet, CSV and HTML."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ppl_eval.config.files import whole_file
from ppl_eval.results import baseline

FIGURES = ("perplexity", "perplexity_stderr", "ce_loss", "nll_sum_hex", "num_tokens", "bits_per_byte")
DIFFERENCES = (
    "perplexity_ratio",
    "perplexity_ratio_stderr",
    "ce_loss_difference",
    "ce_loss_difference_stderr",
    "same_bits",
)
Row = dict[str, Any]

_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string("""\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; font-family: system-ui, sans-serif }
body { margin: 2rem }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border: 1px solid color-mix(in srgb, currentColor 20%, transparent) }
td { text-align: right } th { text-align: left }
td.text { text-align: left }
</style></head><body>
<h1>{{ title }}</h1>
{% if heat %}
<h2>{{ heat.figure }}</h2>
<table><tr><th>{{ heat.rows_of }} \\ {{ heat.columns_of }}</th>
{% for column in heat.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for name, cells in heat.rows %}<tr><th>{{ name }}</th>
{% for cell in cells %}<td style="background: hsl({{ cell.hue }} 70% 50% / 35%)" title="{{ cell.title }}">\
{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endif %}
<h2>Runs</h2>
<table><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for value in row %}<td{% if value is string %} class="text"{% endif %}>\
{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>
<p>{{ note }}</p>
</body></html>
""")


def figures_of(result: Mapping[str, Any]) -> Row:
    """Return the columns that one result gives."""
    return {name: result.get(name) for name in FIGURES}


def differences_of(
    result: Mapping[str, Any], folder: Path, other: Mapping[str, Any] | None, other_folder: Path | None
) -> Row:
    """Return the columns of the paired difference to another result; None each where they share no window."""
    found: Mapping[str, Any] = {}
    if other is not None and other_folder is not None:
        found = baseline.against(result, other, folder, other_folder) or {}
    return {name: found.get(name) for name in DIFFERENCES}


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write rows as ``<path>.parquet`` and ``<path>.csv``; columns of mixed types become text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    with whole_file(path.with_name(f"{path.name}.parquet"), "wb") as file:
        pq.write_table(table, file)
    with whole_file(path.with_name(f"{path.name}.csv"), "wb") as file:
        pyarrow.csv.write_csv(table, file)


def _column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if not kinds <= {int, float} and len(kinds) > 1:
        values = [None if value is None else str(value) for value in values]
    elif kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    return pa.array(values)


def write_page(
    rows: Sequence[Row], path: Path, title: str, axes: Sequence[str], compare_to: str | None
) -> None:
    """Write rows as one HTML file that needs no other, with a heat map where there are two axes.

    Args:
        rows: of the summary.
        path: the file.
        title: of the page.
        axes: names of the columns of the heat map: the first down, the second across; further ones are
            joined to the first.
        compare_to: the run that the differences are to.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    note = (
        f"Ratios and differences are to {compare_to}, window by window, with standard errors by blocks. Of"
        " many runs some differ by chance: about one in twenty lies beyond two standard errors."
        if compare_to
        else "No run is named for the others to be compared with."
    )
    page = _PAGE.render(
        title=title,
        heat=_heat(rows, axes, "perplexity_ratio" if compare_to else "perplexity"),
        columns=names,
        rows=[[_text(row.get(name)) for name in names] for row in rows],
        note=note,
    )
    with whole_file(path) as file:
        file.write(page)


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _heat(rows: Sequence[Row], axes: Sequence[str], figure: str) -> dict[str, Any] | None:
    if len(axes) < 2:
        return None
    *down, across = axes
    found: dict[tuple[str, str], Row] = {
        (" / ".join(str(row[axis]) for axis in down), str(row[across])): row
        for row in rows
        if row.get(across) is not None
    }
    logs = [math.log(value) for row in found.values() if (value := row.get(figure)) and math.isfinite(value)]
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)

    def cell(row: Row | None) -> dict[str, Any]:
        value = None if row is None else row.get(figure)
        if not value or not math.isfinite(value):
            return {"text": "" if row is None else row.get("state", ""), "hue": 0, "title": ""}
        share = (math.log(value) - low) / (high - low) if high > low else 0.0
        return {"text": f"{value:.5g}", "hue": round(120 * (1 - share)), "title": row and row["run"]}

    columns = list(dict.fromkeys(column for _, column in found))
    names = list(dict.fromkeys(name for name, _ in found))
    return {
        "figure": figure,
        "rows_of": " / ".join(down),
        "columns_of": across,
        "columns": columns,
        "rows": [(name, [cell(found.get((name, column))) for column in columns]) for name in names],
    }


def plot(rows: Sequence[Row], column: str, path: Path, apart: Sequence[str] = ()) -> None:
    """Draw perplexity against a column, with standard errors.

    Args:
        rows: of a summary.
        column: what goes along; numbers, or names.
        path: an image, by its ending one of matplotlib's formats.
        apart: columns whose values are lines of their own.

    Raises:
        ValueError: if matplotlib is missing, or no row has both values.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a figure needs matplotlib: pip install 'distributed_ppl_eval[report]'") from error
    known = [row for row in rows if row.get(column) is not None and row.get("perplexity") is not None]
    if not known:
        names = sorted({name for row in rows for name in row})
        raise ValueError(f"no finished run has a value in the column {column!r}; columns: {', '.join(names)}")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(" / ".join(str(row.get(other)) for other in apart) for row in known):
        line = [row for row in known if " / ".join(str(row.get(other)) for other in apart) == name]
        if all(isinstance(row[column], int | float) for row in line):
            line.sort(key=lambda row: row[column])
        axes.errorbar(
            [row[column] for row in line],
            [row["perplexity"] for row in line],
            yerr=[row.get("perplexity_stderr") or 0.0 for row in line],
            marker="o",
            capsize=3,
            label=name or None,
        )
    axes.set_xlabel(column)
    axes.set_ylabel("perplexity (± standard error)")
    axes.grid(alpha=0.3)
    if apart:
        axes.legend()
    figure.savefig(path)
