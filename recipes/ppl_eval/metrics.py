"""Figures that people quote, from exact totals: one division, one exponential, at the end."""

import math
from typing import Any

from ppl_eval.totals import Totals
from ppl_eval.windows import Protocol
from ppl_eval.windows import exp_or_infinity as exp_or_infinity


def json_number(value: float | None) -> float | str | None:
    """A float as strict JSON has it: infinity as the text "Infinity", which ``float()`` reads back."""
    return "Infinity" if value is not None and math.isinf(value) else value


def figures(totals: Totals, num_bytes: int | None, num_words: int | None) -> dict[str, Any]:
    """All metrics of a set of windows.

    Args:
        totals: their sums.
        num_bytes: UTF-8 bytes of the text they cover; None if unknown.
        num_words: its words; None if unknown.

    Returns:
        ``perplexity`` = exp(NLL / tokens), ``bits_per_byte`` = NLL / (bytes ln 2), ``byte_perplexity`` =
        exp(NLL / bytes), ``word_perplexity`` = exp(NLL / words) and the sums behind them.
        ``perplexity_stderr`` is perplexity times the standard error of ce_loss (delta method).
    """
    nll_sum, ce_loss, ce_loss_stderr = totals.nll_sum, totals.ce_loss(), totals.ce_loss_stderr()
    perplexity = exp_or_infinity(ce_loss)
    return {
        "perplexity": json_number(perplexity),
        "perplexity_stderr": None if ce_loss_stderr is None else json_number(perplexity * ce_loss_stderr),
        "ce_loss": ce_loss,
        "ce_loss_stderr": ce_loss_stderr,
        "nll_sum": nll_sum,
        "nll_sum_hex": nll_sum.hex(),
        "num_tokens": totals.num_tokens,
        "num_windows": totals.num_windows,
        "num_bytes": num_bytes,
        "num_words": num_words,
        "bits_per_byte": nll_sum / (num_bytes * math.log(2)) if num_bytes else None,
        "byte_perplexity": json_number(exp_or_infinity(nll_sum / num_bytes)) if num_bytes else None,
        "word_perplexity": json_number(exp_or_infinity(nll_sum / num_words)) if num_words else None,
        "top1_accuracy": totals.num_correct / totals.num_tokens,
    }


def protocol_figures(protocol: Protocol, totals: Totals, num_words: int | None) -> dict[str, Any]:
    """Figures that only this protocol has, and those that its reference computes in another way.

    Args:
        protocol: the protocol.
        totals: the sums of a set of windows.
        num_words: words of the text they cover; None if unknown.
    """
    if protocol.figures is None:
        return {}
    own = protocol.figures(totals.scored_sums(num_words or 0))
    return {name: json_number(value) for name, value in own.items()}
