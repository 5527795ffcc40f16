"""Windows that were left out because their NLL is not finite, wherever a number without them is shown."""

from collections.abc import Mapping
from typing import Any

from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.run.inputs import Inputs

_BEGIN = "nan: exclude: "
_MOST = 8


def note(sums: Accumulator, inputs: Inputs) -> list[str]:
    """Return the line for the notes of the result; none if no window was left out."""
    totals = sums.run.totals
    if not totals.num_excluded_windows:
        return []
    first_W = sums.excluded_W[:_MOST]
    windows = inputs.plan.locate(first_W)
    named = ", ".join(
        f"{window} (document {document}, from its token {start})"
        for window, document, start in zip(
            first_W.tolist(), windows.document.tolist(), windows.start.tolist(), strict=True
        )
    )
    if totals.num_excluded_windows > _MOST:
        named += f" and {totals.num_excluded_windows - _MOST} more"
    empty = [
        name
        for name, domain in sums.domains.items()
        if domain.totals.num_excluded_windows and not domain.totals.num_tokens
    ]
    left = f"; nothing is left of {', '.join(empty)}, which no mean over domains has" if empty else ""
    all_tokens = totals.num_excluded_tokens + totals.num_tokens
    return [
        f"{_BEGIN}{_count(totals.num_excluded_windows)} with {totals.num_excluded_tokens:,} of"
        f" {all_tokens:,} tokens were left out, because their NLL is not finite: {named}{left}"
    ]


def is_note(line: str) -> bool:
    """Return whether a line is one of ``note``'s."""
    return line.startswith(_BEGIN)


def summary(result: Mapping[str, Any]) -> str:
    """Return what a result leaves out, for its table; "" if nothing."""
    num_windows = result.get("num_excluded_windows")
    if not num_windows:
        return ""
    return f"{_count(num_windows)}, {result['num_excluded_tokens']:,} tokens: their NLL is not finite"


def difference(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str | None:
    """Say which windows two results leave out, if these are not the same."""
    ours, theirs = (_ids(found) for found in (result, baseline))
    if ours == theirs:
        return None
    return f"excluded because their NLL is not finite: {_named(ours)} here, {_named(theirs)} in the baseline"


def _ids(result: Mapping[str, Any]) -> list[int]:
    # Results of earlier versions have no such list.
    return list(result.get("coverage", {}).get("excluded_windows", []))


def _named(ids: list[int]) -> str:
    return f"{'window' if len(ids) == 1 else 'windows'} {rank_ranges(ids)}" if ids else "none"


def _count(num_windows: int) -> str:
    return f"{num_windows:,} window{'' if num_windows == 1 else 's'}"
