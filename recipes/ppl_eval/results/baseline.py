"""The regression gate: is this result the number that another run got, and if not, what differs between the
two?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_eval.config.settings import Settings
from ppl_eval.metrics import paired
from ppl_eval.results import excluded
from ppl_eval.results.table import check_output_dir

EXIT_MISMATCH = 3
EXIT_INCOMPARABLE = 4

# Fields that say what a window means: where one differs, no two windows can be compared.
MEANING = (
    "schema",
    "protocol",
    "dataset.fingerprint.tokenizer_sha256",
    "dataset.fingerprint.join",
    "dataset.fingerprint.bos_tokens",
)
# With the fields that say which windows there are, everything that was measured.
_QUESTION = (
    "schema",
    "protocol",
    "dataset.fingerprint",
    "coverage.expected_tokens",
    "coverage.sha256",
)
_INCOMPARABLE = "the baseline measured something else, so the numbers cannot be compared:"
# Fields that may explain a different answer to the same question, likeliest first.
_REASONS = (
    "num_tokens",
    "num_windows",
    "model.checkpoint",
    "model.component",
    "model.num_parameters",
    "quantizer",
    "dtype",
    "device",
    "compile",
    "softmax",
    "plan.batch_size",
    "aggregation.precision",
    "parallel",
    "max_logits_mib",
    "versions",
)


def prepare(settings: Settings) -> dict[str, Any] | None:
    """See that the output folder can be written, and read the baseline, before any work is done.

    Returns:
        The baseline's result, or None if none is named.

    Raises:
        ValueError: if one of them cannot be used.
    """
    check_output_dir(Path(settings.output_dir))
    return read_result(settings.baseline) if settings.baseline else None


class IncomparableError(ValueError):
    """The baseline measured something else; ends the run with ``EXIT_INCOMPARABLE``."""

    exit_code = EXIT_INCOMPARABLE


def check_comparable(asked: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """Refuse a baseline whose windows mean something else, before any are scored.

    Args:
        asked: those fields of the result that are known by then.
        baseline: the baseline's result.

    Raises:
        IncomparableError: if they do.
    """
    lines = differences(asked, baseline, MEANING)
    if lines:
        raise IncomparableError("\n  ".join([_INCOMPARABLE, *lines]))


def read_result(path: str) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: if it is missing, is not JSON, or is not a result.
    """
    try:
        result = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise ValueError(f"baseline: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"baseline: {path} is not JSON: {error}") from error
    if not isinstance(result, dict) or "nll_sum_hex" not in result:
        raise ValueError(f"baseline: {path} is not a result of this tool (no nll_sum_hex in it)")
    return result


def comparable(result: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Compare whether two results answer the same question: what was scored, by which tokenizer and protocol.

    Form, place and name of the data do not matter, nor do model, precision or machines.

    Returns:
        Names of the fields that differ, such as ``dataset.fingerprint.text_sha256``; none where the two
        numbers may be compared.
    """
    return [line.split(": ", 1)[0] for line in differences(result, other, _QUESTION)]


def differences(result: Mapping[str, Any], baseline: Mapping[str, Any], fields: tuple[str, ...]) -> list[str]:
    """Return one line for each of these fields that differs, nested ones leaf by leaf."""
    lines = []
    for field in fields:
        ours, theirs = leaves(_get(result, field), field), leaves(_get(baseline, field), field)
        lines += [
            f"{name}: {ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} in the baseline"
            for name in sorted({*ours, *theirs})
            if ours.get(name, "absent") != theirs.get(name, "absent")
        ]
    return lines


def against(
    result: Mapping[str, Any], baseline: Mapping[str, Any], ours: Path, theirs: Path
) -> dict[str, Any] | None:
    """Return the difference to a baseline over the windows that both share (``paired.against_baseline``).

    Returns:
        None where windows mean different things, or none is known to be shared.
    """
    if differences(result, baseline, MEANING):
        return None
    same_windows = not differences(result, baseline, _QUESTION)
    return paired.against_baseline(result, baseline, ours, theirs, same_windows=same_windows)


def is_quantized(result: Mapping[str, Any]) -> bool:
    """Return whether the result is of quantised weights, be it on load or before."""
    return result.get("quantizer") is not None or bool(_get(result, "model.quantized_checkpoint"))


def compare(result: Mapping[str, Any], baseline: Mapping[str, Any], tolerance: float) -> tuple[int, str]:
    """Hold a result against a baseline.

    Args:
        result: the new one.
        baseline: the one to hold it against.
        tolerance: relative difference of ce_loss that passes; 0 asks for the same bits.

    Returns:
        The exit code (0, ``EXIT_MISMATCH`` or ``EXIT_INCOMPARABLE``) and what to tell the person.
    """
    other_question = differences(result, baseline, _QUESTION)
    left_out = excluded.difference(result, baseline)
    if left_out is not None:
        other_question.append(left_out)
    shared = result.get("against_baseline") if other_question else None
    if other_question and shared is None:
        listed = "\n".join(f"  {line}" for line in other_question)
        if not differences(result, baseline, MEANING):
            listed += "\nper_window=true in both runs compares the windows that both share, if there are any"
        return (
            EXIT_INCOMPARABLE,
            f"{_INCOMPARABLE}\n{listed}",
        )
    where = ""
    more = "" if left_out is None else f"\n{left_out}"
    if shared is None:
        ours, theirs = result["ce_loss"], baseline["ce_loss"]
        same = result["nll_sum_hex"] == baseline["nll_sum_hex"]
    else:
        ours, theirs, same = shared["ce_loss"], shared["baseline_ce_loss"], shared["same_bits"]
        where = f" over the {shared['num_windows']} windows that both share"
    drift = abs(ours - theirs) / max(abs(theirs), 1e-300)
    numbers = f"ce_loss differs by {drift:.3e} relative, allowed {tolerance:g}"
    if shared is None:
        numbers = (
            f"perplexity {result['perplexity']} here, {baseline['perplexity']} in the baseline ({numbers};"
            f" nll_sum {result['nll_sum_hex']} and {baseline['nll_sum_hex']})"
        )
    else:
        numbers = f"ce_loss{where} is {ours} here, {theirs} in the baseline ({numbers})"
    if same or (tolerance > 0 and drift <= tolerance):
        return 0, f"agrees with the baseline{where}{': the same bits' if same else f': {numbers}'}{more}"
    if tolerance == 0 and is_quantized(result) and not is_quantized(baseline):
        return 0, (
            "quantised weights against a full-precision baseline: compared, not gated (baseline_tolerance"
            f" sets a gate). {numbers}{more}"
        )
    reasons = differences(result, baseline, _reasons(result, baseline)) or [
        "none of the recorded fields differ: same checkpoint, dtype, batch size, topology and versions."
        " Suspect hardware, or a kernel that is not deterministic"
    ]
    listed = "\n".join(f"  {line}" for line in reasons)
    return (
        EXIT_MISMATCH,
        f"does not agree with the baseline: {numbers}{more}\nwhat differs between the two results:\n{listed}",
    )


def _reasons(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[str, ...]:
    plans = [found.get("plan", {}) for found in (result, baseline)]
    # Where both promise the same bits for any batch, its size explains nothing.
    if all(plan.get("batch_dependence", "not known") is None for plan in plans):
        return tuple(field for field in _REASONS if field != "plan.batch_size")
    return _REASONS


def _get(result: Mapping[str, Any], field: str) -> Any:
    value: Any = result
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def leaves(value: Any, name: str) -> dict[str, Any]:
    """Return what is not a mapping inside a value, by dotted name."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        leaf: found for key, inner in value.items() for leaf, found in leaves(inner, f"{name}.{key}").items()
    }
