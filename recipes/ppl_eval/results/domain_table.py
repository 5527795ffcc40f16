"""The domains of a run, and the sets and languages of a suite, on a screen."""

from collections.abc import Mapping
from typing import Any

_MOST = 200


def domain_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run with several domains; none for any other."""
    domains = result.get("domains")
    if not domains:
        return []
    rows = [(name, part) for name, part in domains.items()]
    for key in ("sets", "languages"):
        for name, part in result.get(key, {}).items():
            rows.append((f"{key[:-1]} {name}, micro", {**part, "bits_per_byte": part["micro_bits_per_byte"]}))
            rows.append((f"{key[:-1]} {name}, macro", {"bits_per_byte": part["macro_bits_per_byte"]}))
    rows.append(("all, micro", result))
    macro = {"bits_per_byte": result["macro_bits_per_byte"], "perplexity": result["macro_perplexity"]}
    rows.append(("all, macro", macro))
    if len(rows) > _MOST:
        return [f"{len(domains)} domains: their figures are in the result file"]
    head = ("domain", "tokens", "bits per byte", "95 % interval", "perplexity")
    cells = [head, *(_cells(name, part) for name, part in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _left_out(part: Mapping[str, Any]) -> str:
    left_out = part.get("num_excluded_tokens")
    return f" ({left_out:,} left out)" if left_out else ""


def _cells(name: str, part: Mapping[str, Any]) -> tuple[str, ...]:
    interval = part.get("bits_per_byte_interval_95")
    tokens, bits, perplexity = (part.get(key) for key in ("num_tokens", "bits_per_byte", "perplexity"))
    return (
        name,
        "" if tokens is None else f"{tokens:,}" + _left_out(part),
        "" if bits is None else f"{bits:.5f}",
        "" if interval is None else f"{interval[0]:.5f} to {interval[1]:.5f}",
        "" if perplexity is None else perplexity if isinstance(perplexity, str) else f"{perplexity:.4f}",
    )
