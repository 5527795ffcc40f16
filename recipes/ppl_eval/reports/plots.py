"""Figures of the report, drawn by matplotlib as SVG whose text is text and whose colours are the page's."""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that stand for the page's own, which differ between light and dark; no other colour is drawn.
_INK, _FAINT, _ACCENT, _SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_CSS = {_INK: "var(--ink)", _FAINT: "var(--faint)", _ACCENT: "var(--accent)", _SECOND: "var(--second)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
}
_MOST_BARS = 40
_NAME = 36


def _svg(draw: Callable[[Axes], None], title: str, height: float = 3.0) -> Markup:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}), warnings.catch_warnings():
        # The reader's browser has the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(7.2, height), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _CSS.items():
        text = text.replace(colour, variable)
    return Markup(text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1))


def positions(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup:
    """NLL per token by how many tokens the model saw before."""

    def draw(axes: Axes) -> None:
        for place, (name, buckets) in enumerate(runs.items()):
            found = [bucket for bucket in buckets if bucket["num_tokens"]]
            middle = [sum(bucket["context_tokens"]) / 2 for bucket in found]
            (line,) = axes.plot(middle, [bucket["ce_loss"] for bucket in found], marker="o", ms=4, label=name)
            line.set_color(_ACCENT if place == 0 else _SECOND)
            line.set_linestyle(("-", "--", ":", "-.")[place % 4])
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("NLL, nats per token")
        axes.set_xlim(left=0)
        if len(runs) > 1:
            axes.legend()

    return _svg(draw, "NLL by position")


def bars(rows: Sequence[tuple[str, float, Sequence[float] | None]], label: str, title: str) -> Markup:
    """Values with their 95 % intervals, one bar a name; the first 40."""
    rows = rows[:_MOST_BARS]

    def draw(axes: Axes) -> None:
        names = [name if len(name) <= _NAME else name[: _NAME - 1] + "…" for name, _, _ in rows]
        place = np.arange(len(rows))
        axes.barh(place, [value for _, value, _ in rows], height=0.62, color=_ACCENT)
        for at, (_, value, interval) in zip(place, rows, strict=True):
            if interval is not None:
                sides = [[value - interval[0]], [interval[1] - value]]
                axes.errorbar([value], [at], xerr=sides, color=_INK, capsize=4, lw=1.4)
        axes.set_yticks(place, names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)

    return _svg(draw, title, 0.9 + 0.36 * len(rows))


def histogram(values: npt.NDArray[np.float64], label: str, counted: str) -> Markup:
    """How values are spread; the outermost 0.1 % on each side go into the last bins."""

    def draw(axes: Axes) -> None:
        low, high = np.quantile(values, [0.001, 0.999])
        num_bins = int(np.clip(np.sqrt(len(values)) * 1.5, 8, 60))
        limits = (low, high) if high > low else None
        axes.hist(np.clip(values, low, high), bins=num_bins, range=limits, color=_ACCENT)
        axes.axvline(float(np.median(values)), color=_SECOND, lw=1.5, label=f"median {np.median(values):.4g}")
        axes.set_xlabel(label)
        axes.set_ylabel(counted)
        axes.legend()

    return _svg(draw, f"histogram of {label}")


def ratios(rows: Sequence[tuple[str, float, Sequence[float] | None]], base: str) -> Markup:
    """Perplexity ratios with their paired intervals, against a line at 1."""

    def draw(axes: Axes) -> None:
        for place, (_, ratio, interval) in enumerate(rows):
            if interval is not None:
                axes.plot(interval, [place, place], color=_ACCENT, lw=3, solid_capstyle="round")
            axes.plot([ratio], [place], "o", color=_ACCENT, ms=8)
        axes.axvline(1.0, color=_SECOND, lw=1.4)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"perplexity, times that of {base}")

    return _svg(draw, "paired comparison", 1.1 + 0.42 * len(rows))


def percentiles(runs: Mapping[str, Mapping[str, float]]) -> Markup:
    """KL divergence by percentile of tokens, on a logarithmic scale."""

    def draw(axes: Axes) -> None:
        for place, (name, found) in enumerate(runs.items()):
            colour = _ACCENT if place == 0 else _SECOND
            axes.plot(list(found), list(found.values()), marker="o", label=name, color=colour)
        axes.set_yscale("log")
        # Text stays text in the page, so no formulas: 0.01 rather than 10^-2.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("percentile of tokens")
        axes.set_ylabel("KL divergence, nats")
        axes.legend()

    return _svg(draw, "KL divergence")
