"""What goes into ``result.json``: every number with everything that it depends on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torchtune import utils

from ppl_eval.config.components import instantiate
from ppl_eval.config.environment import peak_memory_bytes, versions
from ppl_eval.metrics import denominators, paired
from ppl_eval.metrics import figures as metrics
from ppl_eval.protocols import coverage
from ppl_eval.results import baseline, records
from ppl_eval.results import table as report

if TYPE_CHECKING:
    from distributed_ppl_eval import DistributedPPLEvalRecipe

_ROW = ("data_seconds", "load_seconds", "score_seconds", "reduce_seconds", "num_tokens", "peak_memory_bytes")


def rank_row(recipe: DistributedPPLEvalRecipe) -> npt.NDArray[np.float64]:
    """This rank's timings, for the spread over ranks."""
    here = {
        **recipe.timing,
        "num_tokens": recipe.tokens_here,
        "peak_memory_bytes": peak_memory_bytes(recipe.device),
    }
    return np.array([here[name] for name in _ROW], dtype=np.float64)


def build(recipe: DistributedPPLEvalRecipe, per_rank: npt.NDArray[np.float64]) -> dict[str, Any]:
    """The result of a finished run, as plain JSON values.

    Args:
        recipe: after ``evaluate``.
        per_rank: ``rank_row`` of every rank.
    """
    settings, totals, inputs = recipe.settings, recipe.totals, recipe.inputs
    data, plan, protocol = inputs.data, inputs.plan, inputs.protocol
    columns = {name: per_rank[:, i].tolist() for i, name in enumerate(_ROW)}
    covered = denominators.covered_text(plan, data, inputs.encoder)
    quantization = recipe.model.quantization
    return {
        "schema": report.SCHEMA,
        **metrics.all_figures(recipe.tally, protocol, data, covered),
        "num_documents": data.num_documents,
        "coverage": {
            "expected_tokens": inputs.expected_tokens,
            "scored_tokens": totals.num_tokens,
            "sha256": coverage.digest(totals.scored_lanes, totals.num_tokens),
        },
        "aggregation": _aggregation(recipe),
        "protocol": {
            "name": protocol.name,
            **protocol.parameters,
            "bos_tokens": data.fingerprint["bos_tokens"],
            "prefix_token": inputs.prefix_token,
            "denominator": protocol.denominator,
        },
        "plan": {
            "batch_size": plan.batch_size,
            "num_batches": plan.num_batches,
            "max_windows": settings.max_windows,
            "whole": plan.is_whole,
        },
        "model": {
            "component": settings.model._component_,
            "arguments": {
                key: value for key, value in settings.as_dict()["model"].items() if key != "_component_"
            },
            "num_parameters": recipe.model.num_parameters,
            "checkpoint": recipe.checkpoint.identity,
            "quantized_checkpoint": recipe.checkpoint.quantized,
            "config_check": recipe.config_check,
        },
        "quantizer": (
            None
            if quantization is None
            else {
                **settings.as_dict()["quantizer"],
                "component": settings.quantizer._component_,
                "scheme": quantization.scheme,
                "weight_bytes": quantization.weight_bytes,
                "num_quantized": len(quantization.quantized),
                "num_skipped": len(quantization.skipped),
                "quantized": [list(entry) for entry in quantization.quantized],
                "skipped": [list(entry) for entry in quantization.skipped],
            }
        ),
        "dataset": {
            "name": inputs.source.name,
            "parameters": inputs.source.parameters,
            "num_stream_tokens": data.num_tokens,
            "fingerprint": data.fingerprint,
        },
        "dtype": settings.dtype,
        "device": recipe.device.type,
        "compile": settings.compile,
        "max_logits_mib": settings.max_logits_mib,
        "parallel": recipe.parallel,
        "seed": recipe.seed,
        "timing": {
            "tokens_per_second": totals.num_tokens / max(max(columns["score_seconds"]), 1e-9),
            **{name: max(columns[name]) for name in _ROW[:4]},
            "per_rank": {name: report.spread(values) for name, values in columns.items()},
        },
        "versions": versions(),
        "notes": recipe.notes,
    }


def write_result(recipe: DistributedPPLEvalRecipe, per_rank: npt.NDArray[np.float64]) -> int:
    """Write ``result.json``, print the table, log the numbers, and compare with the baseline; rank 0.

    Args:
        recipe: after ``evaluate``.
        per_rank: ``rank_row`` of every rank.

    Returns:
        The exit code.
    """
    settings = recipe.settings
    result = build(recipe, per_rank)
    path = Path(settings.output_dir) / "result.json"
    if settings.baseline is not None and baseline.is_comparable(result, recipe.baseline):
        other = Path(settings.baseline).expanduser().parent
        result["against_baseline"] = paired.against_baseline(result, recipe.baseline, path.parent, other)
    report.write_json(path, result)
    print(report.table(result, with_memory=settings.log_peak_memory_stats), flush=True)
    utils.get_logger(settings.log_level).info(f"written to {path}")
    if settings.metric_logger is not None:
        metric_logger = instantiate("metric_logger", settings.metric_logger)
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
        metric_logger.log_dict(numbers, step=0)
        metric_logger.close()
    if settings.baseline is None:
        return 0
    code, message = baseline.compare(result, recipe.baseline, settings.baseline_tolerance)
    if "against_baseline" in result and result["nll_sum_hex"] != recipe.baseline["nll_sum_hex"]:
        message += f"\n{paired.told(result['against_baseline'])}"
    print(message, file=sys.stderr, flush=True)
    return code


def write_records(recipe: DistributedPPLEvalRecipe) -> None:
    """Write what each window and document scored, where asked for; all ranks take part."""
    settings, inputs = recipe.settings, recipe.inputs
    if settings.per_window or settings.per_document:
        records.write(
            Path(settings.output_dir) if recipe.world.rank == 0 else None,
            recipe.ledger.own(),
            inputs.plan,
            inputs.data,
            denominators.covered_text(inputs.plan, inputs.data, inputs.encoder),
            recipe.add_over_ranks,
            per_window=settings.per_window,
            per_document=settings.per_document,
        )


def _aggregation(recipe: DistributedPPLEvalRecipe) -> dict[str, Any]:
    chosen = {"precision": recipe.precision, "topology": recipe.settings.aggregation["topology"]}
    if recipe.rounded_nll is None:
        return chosen
    exact = recipe.totals.nll_sum
    return {
        **chosen,
        "nll_sum": recipe.rounded_nll,
        "perplexity": metrics.json_number(
            metrics.exp_or_infinity(recipe.rounded_nll / recipe.totals.num_tokens)
        ),
        "drift": (recipe.rounded_nll - exact) / exact if exact else 0.0,
    }
