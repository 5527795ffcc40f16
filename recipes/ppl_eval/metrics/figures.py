"""Figures that people quote, from exact sums: one division, one exponential, at the end."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics import comparison
from ppl_eval.metrics.accumulator import Accumulator, PartSums
from ppl_eval.metrics.denominators import CoveredText
from ppl_eval.metrics.groups import Domain, bits_per_byte_uncertainty, suite_figures
from ppl_eval.metrics.standard_error import Blocks
from ppl_eval.metrics.totals import Totals
from ppl_eval.protocols.base import Protocol, exp_or_infinity

# English has 6 bytes a word, source code 10, Finnish and Russian 15, Tamil above 30; a Chinese line is one
# word of a hundred.
_MOST_BYTES_OF_WORD = 40


def json_number(value: float | None) -> float | str | None:
    """Return a float as strict JSON has it: infinity as the text "Infinity", which ``float()`` reads back."""
    return "Infinity" if value is not None and math.isinf(value) else value


def figures(totals: Totals, num_bytes: int | None, num_words: int | None) -> dict[str, Any]:
    """Return all metrics of a set of windows, apart from their uncertainty.

    Args:
        totals: their sums.
        num_bytes: UTF-8 bytes of the text they cover; None if unknown.
        num_words: its words; None if unknown.

    Returns:
        ``perplexity`` = exp(NLL / tokens), ``bits_per_byte`` = NLL / (bytes ln 2), ``byte_perplexity`` =
        exp(NLL / bytes), ``word_perplexity`` = exp(NLL / words) and the sums behind them; None where there is
        nothing to divide by.
    """
    nll_sum = totals.nll_sum
    ce_loss = totals.ce_loss() if totals.num_tokens else None
    return {
        "perplexity": _exp(ce_loss),
        "ce_loss": ce_loss,
        "nll_sum": nll_sum,
        "nll_sum_hex": nll_sum.hex(),
        "num_tokens": totals.num_tokens,
        "num_windows": totals.num_windows,
        "num_excluded_tokens": totals.num_excluded_tokens,
        "num_excluded_windows": totals.num_excluded_windows,
        "num_bytes": num_bytes,
        "num_words": num_words,
        "bits_per_byte": nll_sum / (num_bytes * math.log(2)) if num_bytes else None,
        "byte_perplexity": _exp(nll_sum / num_bytes) if num_bytes else None,
        "word_perplexity": _exp(nll_sum / num_words) if num_words else None,
        "top1_accuracy": totals.num_correct / totals.num_tokens if totals.num_tokens else None,
    }


def words_note(found: Mapping[str, Any]) -> list[str]:
    """Return the line for the notes of a result whose word count means nothing; none where it does.

    Args:
        found: ``num_bytes`` and ``num_words`` of the text, and the same of its ``domains``.
    """
    texts = {"this text": found, **found.get("domains", {})}
    doubted = [
        f"{name} has {part['num_bytes']:,} bytes and {part['num_words']:,} of them"
        for name, part in texts.items()
        if part["num_words"] and part["num_bytes"] > _MOST_BYTES_OF_WORD * part["num_words"]
    ]
    if not doubted:
        return []
    return [
        f"word_perplexity means little here: words are what white space separates, and {', '.join(doubted)}."
        " Some scripts (Chinese, Japanese, Thai, ...) do without; bits_per_byte compares"
    ]


def uncertainty(totals: Totals, blocks: Blocks) -> dict[str, Any]:
    """Return how sure the perplexity is (see ``standard_error``).

    Returns:
        ``ce_loss_stderr``, ``perplexity_stderr`` (perplexity times that: delta method),
        ``perplexity_interval_95`` (exp of the interval of ce_loss, so not symmetric) and what the blocks are;
        None where there are too few blocks.
    """
    stderr, half_width = blocks.ce_loss_stderr(), blocks.half_width_95()
    ce_loss = totals.ce_loss() if totals.num_tokens else 0.0
    interval = None
    if half_width is not None:
        interval = [_exp(ce_loss - half_width), _exp(ce_loss + half_width)]
    return {
        "ce_loss_stderr": stderr,
        "perplexity_stderr": None if stderr is None else json_number(exp_or_infinity(ce_loss) * stderr),
        "perplexity_interval_95": interval,
        "stderr_blocks": {"made_of": blocks.kind, "num_blocks": blocks.num_blocks},
    }


def protocol_figures(protocol: Protocol, totals: Totals, num_words: int | None) -> dict[str, Any]:
    """Return figures that only this protocol has, and those that its reference computes in another way.

    Args:
        protocol: the protocol.
        totals: the sums of a set of windows.
        num_words: words of the text they cover; None if unknown.
    """
    if not totals.num_tokens:
        return {}
    own = protocol.figures(totals.scored_sums(num_words or 0))
    return {name: json_number(value) for name, value in own.items()}


def all_figures(
    sums: Accumulator, protocol: Protocol, data: TokenData, covered: CoveredText | None
) -> dict[str, Any]:
    """Return the figures of a run: of all windows (micro: every token weighs the same), and of parts of them
    under ``domains`` and ``positions``, where these are counted.

    ``macro_ce_loss`` is the mean over domains of their ``ce_loss``, so that every domain weighs the same, and
    ``macro_perplexity`` its exponential.
    """

    def of(part: Any, documents: Any) -> dict[str, Any]:
        num_bytes = num_words = None
        if covered is not None:
            num_bytes = int(covered.num_bytes_D[documents].sum())
            num_words = int(covered.num_words_D[documents].sum())
        return {
            **figures(part.totals, num_bytes, num_words),
            **uncertainty(part.totals, part.blocks),
            **bits_per_byte_uncertainty(part.blocks, part.totals.num_tokens, num_bytes),
            **protocol_figures(protocol, part.totals, num_words),
            **_compared(part),
        }

    found = of(sums.run, slice(None))
    if sums.domains:
        assert data.domain_D is not None
        covered_domain_D = data.domain_D if covered is None else data.domain_D[: len(covered.num_bytes_D)]
        found["domains"] = {
            name: of(domain, np.flatnonzero(covered_domain_D == index))
            for index, (name, domain) in enumerate(sums.domains.items())
        }
        losses = [part["ce_loss"] for part in found["domains"].values() if part["ce_loss"] is not None]
        found["macro_ce_loss"] = math.fsum(losses) / len(losses) if losses else None
        found["macro_perplexity"] = _exp(found["macro_ce_loss"])
        sizes = {name: part["num_bytes"] for name, part in found["domains"].items()}
        found |= suite_figures({name: Domain(sums.domains[name], size) for name, size in sizes.items()})
    if sums.positions:
        found["positions"] = [
            {
                "context_tokens": [i * sums.bucket_width + 1, (i + 1) * sums.bucket_width],
                **{name: figures(bucket, None, None)[name] for name in _BY_POSITION},
            }
            for i, bucket in enumerate(sums.positions)
        ]
        for part, bucket, compared in zip(
            found["positions"], sums.positions, sums.compared_positions, strict=False
        ):
            part["comparison"] = comparison.bucket_figures(compared, bucket.nll_fixed, bucket.num_tokens)
    return found


_BY_POSITION = ("perplexity", "ce_loss", "nll_sum", "num_tokens", "num_excluded_tokens", "top1_accuracy")


def _compared(part: PartSums) -> dict[str, Any]:
    if part.compared is None:
        return {}
    totals = part.totals
    return {"comparison": comparison.figures(part.compared, totals.nll_fixed, totals.num_tokens)}


def _exp(value: float | None) -> float | str | None:
    return None if value is None else json_number(exp_or_infinity(value))
