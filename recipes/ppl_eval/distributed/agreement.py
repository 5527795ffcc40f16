"""What the reports of all ranks say about a step: who is missing, what failed where, what differs."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A node of the run.

    Attributes:
        name: what the launcher calls it; unique.
        host: its host name, for people.
        ranks: its ranks, ascending.
    """

    name: str
    host: str
    ranks: list[int]


def group_by_node(reports: list[dict[str, Any] | None]) -> list[Node]:
    """Return the nodes that reports, none of which is missing, came from; ordered by their first rank."""
    nodes: dict[str, Node] = {}
    for rank, report in enumerate(reports):
        assert report is not None
        nodes.setdefault(report["node"], Node(report["node"], report["host"], [])).ranks.append(rank)
    return list(nodes.values())


def find_problem(reports: list[dict[str, Any] | None]) -> str | None:
    """Return what is wrong, in words for the person.

    Args:
        reports: by rank; ``host``, ``error`` (a message or None) and ``facts`` (name to JSON text). None
            for a rank that did not report.

    Returns:
        One message over all ranks; None if nothing is wrong.
    """
    missing = [rank for rank, report in enumerate(reports) if report is None]
    came = {rank: report for rank, report in enumerate(reports) if report is not None}
    if missing:
        there = by_host({rank: report["host"] for rank, report in came.items()})
        return f"rank {rank_ranges(missing)} did not come within timeout_seconds; there are {there}"
    errors = {rank: report["error"] for rank, report in came.items() if report["error"]}
    if errors:
        if len(set(errors.values())) == 1 and len(errors) == len(reports):
            return errors[0]
        return "\n".join(
            f"rank {rank_ranges(ranks)} on {came[ranks[0]]['host']}: {message}"
            for message, ranks in _group(errors).items()
        )
    lines = []
    for fact in sorted({name for report in came.values() for name in report["facts"]}):
        values = {rank: report["facts"].get(fact, "nothing") for rank, report in came.items()}
        groups = _group(values)
        if len(groups) > 1:
            listed = "; ".join(
                f"{value} on {by_host({rank: came[rank]['host'] for rank in ranks})}"
                for value, ranks in groups.items()
            )
            lines.append(f"{fact} differs between ranks: {listed}")
    return "\n".join(lines) or None


def _group(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def by_host(hosts: Mapping[int, str]) -> str:
    """Return hosts with their ranks, in words, from the host of each rank."""
    return ", ".join(f"{host} (rank {rank_ranges(ranks)})" for host, ranks in _group(hosts).items())


def rank_ranges(ranks: list[int]) -> str:
    """Write ranks, ascending, as ranges.

    Example:
        >>> rank_ranges([0, 1, 2, 5])
        '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
