"""What goes into ``result.json``: every number with everything that it depends on."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf
from torchtune.utils import get_logger

from ppl_eval.checkpoints.hub import snapshot_of
from ppl_eval.checkpoints.load import LoadedCheckpoint
from ppl_eval.config.environment import kernel_facts, peak_memory_bytes, versions
from ppl_eval.config.files import write_json
from ppl_eval.config.settings import Settings
from ppl_eval.metrics import denominators, figures, paired
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.metrics.totals import Totals
from ppl_eval.protocols import coverage
from ppl_eval.results import baseline, excluded, table
from ppl_eval.results.joined import Joined, precision_of
from ppl_eval.results.ledger import plan_key
from ppl_eval.results.provenance import run_facts
from ppl_eval.run import cross_check, forward, schedule
from ppl_eval.run.facts import batch_dependence, plan_facts
from ppl_eval.run.inputs import Inputs
from ppl_eval.run.state import RunState, Scored
from ppl_eval.scoring.load import BuiltModel

PART_RESULT = "part.json"
_ROW = (
    "data_seconds",
    "load_seconds",
    "score_seconds",
    "reduce_seconds",
    "num_tokens",
    "peak_memory_bytes",
    "windows_at_once",
)


def check_comparable(inputs: Inputs, other: Mapping[str, Any] | None) -> None:
    """Refuse a baseline that measured something else, before any window is scored.

    Args:
        inputs: what the run will score.
        other: the baseline's result, if there is one.

    Raises:
        baseline.IncomparableError: if it did.
    """
    if other is not None:
        baseline.check_comparable({"schema": table.SCHEMA, **_asked(inputs)}, other)


def rank_row(state: RunState, scored: Scored) -> npt.NDArray[np.float64]:
    """Return this rank's timings, for the spread over ranks."""
    here = {
        "data_seconds": state.source.seconds,
        "load_seconds": state.load_seconds,
        "score_seconds": scored.score_seconds,
        "reduce_seconds": scored.reduce_seconds,
        "num_tokens": scored.tokens_here,
        "peak_memory_bytes": peak_memory_bytes(state.device),
        "windows_at_once": scored.windows_at_once,
    }
    return np.array([here[name] for name in _ROW], dtype=np.float64)


def build(
    state: RunState, scored: Scored, per_rank: npt.NDArray[np.float64], joined: Joined
) -> dict[str, Any]:
    """Return the result of a finished run as plain JSON values.

    Args:
        state: the run.
        scored: what it scored.
        per_rank: ``rank_row`` of every rank.
        joined: what the ranks found together.
    """
    settings, inputs = state.settings, state.inputs
    expected_tokens = state.share.expected_tokens
    found = measured(settings, inputs, scored.accumulator, expected_tokens, joined)
    checked = cross_check.compare(state)
    return {
        "schema": table.SCHEMA,
        "key": plan_key(plan_facts(state)),
        **found,
        **_question(state, scored),
        "model": _model(state),
        "quantizer": _quantizer(settings, state.model),
        "reference": _reference(state),
        "cross_check": checked,
        "dtype": settings.dtype,
        "device": state.device.type,
        "compile": settings.compile,
        "max_logits_mib": settings.max_logits_mib,
        "softmax": settings.softmax,
        "parallel": {
            **asdict(state.dims),
            "num_nodes": len(state.world.nodes),
            "schedule": schedule.in_use(state),
        },
        "seed": state.source.seed,
        "timing": _timing(scored, per_rank),
        "tags": settings.as_dict().get("tags") or {},
        "run": run_facts(state),
        "versions": versions(),
        "kernels": kernel_facts(state.device),
        "notes": [
            *state.notes,
            *cross_check.note(checked),
            *excluded.note(scored.accumulator, inputs),
            *figures.words_note(found),
            *forward.memory_note(state, scored.accumulator.run.totals),
        ],
    }


def measured(
    settings: Settings,
    inputs: Inputs,
    sums: Accumulator,
    expected_tokens: int,
    joined: Joined,
) -> dict[str, Any]:
    """Return the fields of a result that come from what was scored, whoever scored it.

    Args:
        settings: of the run.
        inputs: tokens and plan.
        sums: of all that was scored.
        expected_tokens: targets that had to be scored.
        joined: what the ranks found together.
    """
    # Which part of the text a part of the run covers is not known.
    covered = None
    if settings.part is None:
        covered = denominators.covered_text(inputs.plan, inputs.data, sums.excluded_W)
    totals = sums.run.totals
    return {
        **_with_percentiles(figures.all_figures(sums, inputs.protocol, inputs.data, covered), joined),
        "num_documents": inputs.data.num_documents,
        "bytes_and_words_of": None if covered is None else covered.of,
        "coverage": {
            "expected_tokens": expected_tokens,
            "scored_tokens": totals.num_tokens,
            "excluded_tokens": totals.num_excluded_tokens,
            "excluded_windows": sums.excluded_W.tolist(),
            "sha256": coverage.digest(totals.scored_hash_sums, totals.num_tokens),
        },
        "aggregation": {
            "precision": precision_of(settings, inputs),
            "topology": settings.aggregation.topology,
            **_rounded(totals, joined.rounded_nll),
        },
    }


def _with_percentiles(found: dict[str, Any], joined: Joined) -> dict[str, Any]:
    if joined.kl_percentiles:
        found["comparison"]["kl_percentiles"] = joined.kl_percentiles
    return found


def _rounded(totals: Totals, rounded_nll: float | None) -> dict[str, Any]:
    if rounded_nll is None:
        return {}
    perplexity = figures.exp_or_infinity(rounded_nll / totals.num_tokens)
    return {
        "nll_sum": rounded_nll,
        "perplexity": figures.json_number(perplexity),
        "drift": (rounded_nll - totals.nll_sum) / totals.nll_sum if totals.nll_sum else 0.0,
    }


def _question(state: RunState, scored: Scored) -> dict[str, Any]:
    """Return what was measured: protocol, plan and data."""
    plan = state.inputs.plan
    return {
        **_asked(state.inputs),
        "plan": {
            "batch_size": plan.batch_size,
            "num_batches": plan.num_batches,
            "windows_in_parts": scored.accumulator.run.totals.num_windows_in_parts,
            "batch_dependence": batch_dependence(state),
            "resumed_batches": state.num_done,
            "max_windows": state.settings.max_windows,
            "whole": plan.is_whole,
        },
    }


def _asked(inputs: Inputs) -> dict[str, Any]:
    data, protocol = inputs.data, inputs.protocol
    return {
        "protocol": {
            "name": protocol.name,
            **protocol.parameters,
            "bos_tokens": data.fingerprint["bos_tokens"],
            "prefix_token": inputs.prefix_token,
            "denominator": protocol.denominator,
        },
        "dataset": {
            "name": inputs.source.name,
            "parameters": inputs.source.parameters,
            "num_stream_tokens": data.num_tokens,
            "fingerprint": data.fingerprint,
        },
    }


def _model(state: RunState) -> dict[str, Any]:
    source = state.source
    return _described(state.settings, state.model, source.checkpoint, state.weights_hash, source.config_check)


def _reference(state: RunState) -> dict[str, Any] | None:
    reference, model = state.source.reference, state.model.reference
    if reference is None:
        return None
    assert model is not None
    assert state.reference_hash is not None
    return {
        **_described(
            reference.settings, model, reference.checkpoint, state.reference_hash, reference.config_check
        ),
        "quantizer": _quantizer(reference.settings, model),
    }


def _described(
    settings: Settings, model: BuiltModel, checkpoint: LoadedCheckpoint, weights_hash: str, config_check: str
) -> dict[str, Any]:
    section = OmegaConf.to_container(settings.model, resolve=True)
    assert isinstance(section, dict)
    return {
        "component": section["_component_"],
        "arguments": {key: value for key, value in section.items() if key != "_component_"},
        "num_parameters": model.num_parameters,
        "checkpoint": {"weights_hash": weights_hash, "files": checkpoint.identity},
        "hub": snapshot_of(str(settings.checkpointer.get("checkpoint_dir", ""))),
        "quantized_checkpoint": checkpoint.quantized,
        "dequantized_from": checkpoint.packing,
        "config_check": config_check,
    }


def _quantizer(settings: Settings, model: BuiltModel) -> dict[str, Any] | None:
    quantization = model.quantization
    if quantization is None:
        return None
    section = OmegaConf.to_container(settings.quantizer, resolve=True)
    assert isinstance(section, dict)
    return {
        **section,
        "component": section["_component_"],
        "scheme": quantization.scheme,
        "weight_bytes": quantization.weight_bytes,
        "num_quantized": len(quantization.quantized),
        "num_skipped": len(quantization.skipped),
        "quantized": [list(entry) for entry in quantization.quantized],
        "skipped": [list(entry) for entry in quantization.skipped],
    }


def _timing(scored: Scored, per_rank: npt.NDArray[np.float64]) -> dict[str, Any]:
    columns = {name: per_rank[:, i].tolist() for i, name in enumerate(_ROW)}
    return {
        # Of what this run scored; earlier runs may have scored the rest.
        "tokens_per_second": sum(columns["num_tokens"]) / max(max(columns["score_seconds"]), 1e-9),
        **{name: max(columns[name]) for name in _ROW[:4]},
        "per_rank": {name: table.spread(values) for name, values in columns.items()},
    }


def write_result(
    state: RunState,
    scored: Scored,
    per_rank: npt.NDArray[np.float64],
    joined: Joined,
    other: Mapping[str, Any] | None,
    *,
    metric_logger: Any = None,
) -> int:
    """Write ``result.json``, print the table, log the numbers, and compare with the baseline; rank 0.

    Args:
        state: the run.
        scored: what it scored.
        per_rank: ``rank_row`` of every rank.
        joined: what the ranks found together.
        other: the baseline's result, if there is one.
        metric_logger: one of torchtune's, or None.

    Returns:
        The exit code.
    """
    settings = state.settings
    result = build(state, scored, per_rank, joined)
    path = Path(settings.output_dir) / "result.json"
    if other is not None:
        assert settings.baseline is not None
        folder = Path(settings.baseline).expanduser().parent
        result["against_baseline"] = baseline.against(result, other, path.parent, folder)
    if settings.part is not None:
        _write_part(state, result)
        return 0
    publish(settings, result, path, metric_logger, quiet=state.world.embedded)
    if other is None:
        return 0
    code, message = baseline.compare(result, other, settings.baseline_tolerance)
    if (shared := result["against_baseline"]) is not None and not shared["same_bits"]:
        message += f"\n{paired.sentence(shared)}"
    print(message, file=sys.stderr, flush=True)
    return code


def publish(
    settings: Settings,
    result: Mapping[str, Any],
    path: Path,
    metric_logger: Any = None,
    *,
    quiet: bool = False,
) -> None:
    """Write a result, print its table unless it shall be quiet, and log its numbers."""
    write_json(path, result)
    if not quiet:
        print(table.table(result, with_memory=settings.log_peak_memory_stats), flush=True)
    get_logger(settings.log_level).info(f"written to {path}")
    if metric_logger is not None:
        numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
        metric_logger.log_dict(numbers, step=0)


def _write_part(state: RunState, result: Mapping[str, Any]) -> None:
    settings = state.settings
    path = Path(settings.output_dir) / PART_RESULT
    write_json(path, {**result, "part": settings.part, "config": settings.as_dict()})
    left_out = f"; left out: {text}" if (text := excluded.summary(result)) else ""
    print(
        f"part {settings.part}: {result['num_windows']:,} windows, {result['num_tokens']:,} tokens{left_out};"
        f" written to {path.parent}. When all parts are done: ppl-eval merge {path.parent.parent} -o DIR",
        flush=True,
    )
