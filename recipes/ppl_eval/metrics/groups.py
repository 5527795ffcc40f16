"""Averages over domains: of all of them, and of the sets and languages of a suite (``ppl_eval.data.suite``).

Micro averages weigh every byte (or token) the same, macro averages every domain.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ppl_eval.metrics.accumulator import PartSums
from ppl_eval.metrics.standard_error import Blocks, joined
from ppl_eval.metrics.totals import FRACTION_BITS, fixed_to_float


class Domain(NamedTuple):
    """A domain's exact sums, and the bytes of its text; None if unknown."""

    sums: PartSums
    num_bytes: int | None


def bits_per_byte_uncertainty(blocks: Blocks, num_tokens: int, num_bytes: int | None) -> dict[str, Any]:
    """Return standard error and 95 % interval of bits per byte: those of NLL per token in other units, the
    text being what it is."""
    stderr, half_width = blocks.ce_loss_stderr(), blocks.half_width_95()
    interval = None
    scale = num_tokens / (num_bytes * math.log(2)) if num_bytes else None
    if scale is not None and half_width is not None:
        middle = fixed_to_float(sum(blocks.nll_fixed)) / (num_bytes or 1) / math.log(2)
        interval = [middle - half_width * scale, middle + half_width * scale]
    return {
        "bits_per_byte_stderr": None if stderr is None or scale is None else stderr * scale,
        "bits_per_byte_interval_95": interval,
    }


def suite_figures(domains: Mapping[str, Domain]) -> dict[str, Any]:
    """Return the averages of a run with several domains.

    Returns:
        ``macro_bits_per_byte`` (None where a domain's bytes are unknown); and where names have the form
        ``set/language``, ``sets`` and ``languages``: figures of each over its domains.
    """
    found: dict[str, Any] = {"macro_bits_per_byte": _macro(domains.values())}
    if not all("/" in name for name in domains):
        return found
    for key, place in (("sets", 0), ("languages", 1)):
        groups: dict[str, list[Domain]] = {}
        for name, domain in domains.items():
            groups.setdefault(name.split("/", 1)[place], []).append(domain)
        found[key] = {name: _group(members) for name, members in groups.items()}
    return found


def _group(members: Sequence[Domain]) -> dict[str, Any]:
    totals = [member.sums.totals for member in members]
    nll_fixed, num_tokens = sum(t.nll_fixed for t in totals), sum(t.num_tokens for t in totals)
    sizes = [member.num_bytes for member in members]
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    blocks = joined([member.sums.blocks for member in members])
    return {
        "num_domains": len(members),
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
        "nll_sum": fixed_to_float(nll_fixed),
        "micro_ce_loss": nll_fixed / (num_tokens << FRACTION_BITS) if num_tokens else None,
        "micro_bits_per_byte": fixed_to_float(nll_fixed) / (num_bytes * math.log(2)) if num_bytes else None,
        **bits_per_byte_uncertainty(blocks, num_tokens, num_bytes),
        "macro_bits_per_byte": _macro(members),
    }


def _macro(members: Iterable[Domain]) -> float | None:
    scored = [member for member in members if member.sums.totals.num_tokens]
    if not scored or not all(member.num_bytes for member in scored):
        return None
    bits = [member.sums.totals.nll_sum / ((member.num_bytes or 1) * math.log(2)) for member in scored]
    return math.fsum(bits) / len(bits)
