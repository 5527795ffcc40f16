"""A comparison on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_LONGEST_TEXT = 240


def print_comparison(found: Mapping[str, Any], console: Console) -> None:
    """Print the tables of ``compare_runs``."""
    base = found["base"]
    table = _table(f"compared with {base['name']} (perplexity {_figure(base['perplexity'], 4)})")
    for name in (
        "run",
        "perplexity",
        "ratio",
        "95 % interval",
        "NLL difference",
        "p (Holm)",
        "KL",
        "same top",
    ):
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for entry in found["comparisons"]:
        kl = entry.get("kl", {})
        table.add_row(
            Text(entry["name"]),
            _figure(entry["perplexity"], 4),
            *_cells(entry),
            _figure(kl.get("kl_mean"), 6),
            _share(kl.get("same_top")),
        )
    console.print(table)
    for entry in found["comparisons"]:
        _details(entry, console)
    console.print(Text(f"p-values: {found['correction']}"))


def _details(entry: Mapping[str, Any], console: Console) -> None:
    name = entry["name"]
    for line in [*entry.get("why", ()), *entry["notes"]]:
        console.print(Text(f"{name}: {line}"))
    if entry["kind"] == "bytes":
        difference = f"{entry['bits_per_byte_difference']:+.6f}"
        interval = _interval(entry["bits_per_byte_difference_interval_95"], 6)
        line = f"{name}: {entry['bits_per_byte']:.6f} bits per byte,"
        line += f" the base {entry['base_bits_per_byte']:.6f}"
        line += f"; difference {difference}" + (f" (95 %: {interval})" if interval else "")
        console.print(Text(line))
    if entry.get("domains"):
        table = _table(f"{name}: domains")
        for head in ("domain", "windows", "ratio", "95 % interval", "NLL difference", "p (Holm)"):
            table.add_column(head, justify="left" if head == "domain" else "right")
        for domain, part in entry["domains"].items():
            table.add_row(Text(domain), f"{part['num_windows']:,}", *_cells(part))
        console.print(table)
    if documents := entry.get("documents"):
        line = f"{name}: {entry['num_windows_worse']:,} of {entry['num_windows']:,} windows got worse"
        if documents["num_documents"] > 1:
            line += f", {documents['num_worse']:,} of {documents['num_documents']:,} documents"
        console.print(Text(line))
    if entry.get("worse_windows"):
        _print_windows(entry, console)


def _print_windows(entry: Mapping[str, Any], console: Console) -> None:
    table = _table(f"{entry['name']}: windows that got worse the most")
    for head in ("window", "document", "NLL, base", "NLL", "difference", "text"):
        table.add_column(head, justify="left" if head == "text" else "right")
    for row in entry["worse_windows"]:
        text = row["text"]
        shown = "(per_token=true keeps it)" if text is None else " ".join(text.split())
        if len(shown) > _LONGEST_TEXT:
            shown = shown[:_LONGEST_TEXT] + "…"
        numbers = [f"{row[key]:.4f}" for key in ("base_ce_loss", "ce_loss")]
        difference = f"{row['ce_loss_difference']:+.4f}"
        table.add_row(
            str(row["window_id"]), str(row["document"]), *numbers, difference, Text(printable(shown))
        )
    console.print(table)


def printable(text: str) -> str:
    """Replace control characters: a text must not steer the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", header_style="bold")


def _cells(part: Mapping[str, Any]) -> tuple[str, ...]:
    p = part.get("p_value_holm")
    difference = part.get("ce_loss_difference")
    return (
        _figure(part.get("perplexity_ratio"), 5),
        _interval(part.get("perplexity_ratio_interval_95"), 5),
        "" if difference is None else f"{difference:+.6f}",
        "" if p is None else f"{p:.2g}",
    )


def _figure(value: float | str | None, digits: int) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _interval(ends: list[Any] | None, digits: int) -> str:
    return "" if ends is None else f"{_figure(ends[0], digits)} to {_figure(ends[1], digits)}"
