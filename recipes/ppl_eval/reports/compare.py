"""Finished runs beside a base run: what differs, by how much, and whether that is more than noise.

Differences are taken window by window (``metrics.paired``), so what makes a text hard cancels. Every run that
is compared is one more chance of a false finding: p-values are adjusted by Holm's method, those of whole runs
over the runs, those of domains over the domains of a run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.metrics.paired import FloatArray, paired_blocks, shared_windows
from ppl_eval.metrics.standard_error import FEWEST_BLOCKS, holm, two_sided_p
from ppl_eval.protocols.base import IntArray, exp_or_infinity
from ppl_eval.reports.runs import Run
from ppl_eval.reports.texts import plain_text
from ppl_eval.results.baseline import MEANING, comparable, differences

_TOKENIZER = "dataset.fingerprint.tokenizer_sha256"
# What follows from the tokenizer and so differs with it.
_OF_TOKENIZER = {_TOKENIZER, "dataset.fingerprint.bos_tokens", "protocol.bos_tokens", "protocol.prefix_token"}
_KL = ("kl_mean", "kl_stderr", "kl_interval_95", "kl_percentiles", "reverse_kl_mean", "same_top")


def compare_runs(base: Run, others: Sequence[Run], num_worst: int = 5) -> dict[str, Any]:
    """Compare runs with a base.

    Args:
        base: what the others are held against.
        others: one or more.
        num_worst: windows and documents to list that got worse the most.

    Returns:
        Plain JSON values: ``base``, ``correction`` and one entry a run in ``comparisons``.
    """
    found = [_pair(base, other, num_worst) for other in others]
    for entry, adjusted in zip(found, holm([entry.get("p_value") for entry in found]), strict=True):
        if "p_value" in entry:
            entry["p_value_holm"] = adjusted
    return {
        "base": {"name": base.name, "perplexity": base.result["perplexity"]},
        "correction": f"Holm over {len(others)} comparison{'s' if len(others) > 1 else ''} with the base;"
        " domains: Holm over the domains of a run",
        "comparisons": found,
    }


def _pair(base: Run, other: Run, num_worst: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": other.name, "perplexity": other.result["perplexity"], "notes": []}
    entry["bits_per_byte"] = other.result.get("bits_per_byte")
    meaning = [line.split(": ", 1)[0] for line in differences(other.result, base.result, MEANING)]
    if _TOKENIZER in meaning and set(meaning) <= _OF_TOKENIZER:
        return entry | _by_bytes(base, other, entry["notes"])
    if meaning:
        lines = differences(other.result, base.result, MEANING)
        return entry | {
            "kind": "incomparable",
            "why": [line.replace("the baseline", "the base") for line in lines],
        }
    entry |= _by_windows(base, other, num_worst, entry["notes"])
    if entry["kind"] != "incomparable" and (kl := other.result.get("comparison")):
        entry["kl"] = {name: kl[name] for name in _KL if name in kl}
        entry["kl"]["reference_is_base"] = is_reference(base.result, other.result)
        if not entry["kl"]["reference_is_base"]:
            entry["notes"].append(
                "its KL divergence is from the reference of its own config, which is not the base"
            )
    return entry


def is_reference(base: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a run's reference is the model of the base: the same weights, quantised alike."""
    reference = other.get("reference") or {}
    weights = reference.get("checkpoint", {}).get("weights_hash")
    same = weights is not None and weights == base["model"]["checkpoint"]["weights_hash"]
    schemes = [
        (section or {}).get("scheme") for section in (reference.get("quantizer"), base.get("quantizer"))
    ]
    return same and schemes[0] == schemes[1]


def _by_windows(base: Run, other: Run, num_worst: int, notes: list[str]) -> dict[str, Any]:
    if base.windows is None or other.windows is None:
        if different := comparable(other.result, base.result):
            return {
                "kind": "incomparable",
                "why": [
                    f"other windows ({', '.join(different)} differ); per_window=true in both runs compares"
                    " the windows that both share"
                ],
            }
        difference = other.result["ce_loss"] - base.result["ce_loss"]
        notes.append("no interval: it needs windows.parquet (per_window=true) in both runs")
        return {"kind": "totals", **_ratio(difference)}
    a, b = base.windows, other.windows
    there, here = shared_windows(a["content"], b["content"])
    if not len(here):
        return {"kind": "incomparable", "why": ["no window is shared"]}
    difference_W, tokens_W = b["nll_sum"][here] - a["nll_sum"][there], b["num_tokens"][here]
    document_W, domain_W = b["document"][here], b["domain"][here].astype(str)
    if not len(here) == len(a["content"]) == len(b["content"]):
        counts = f"{len(here):,} windows are shared, of {len(a['content']):,} and {len(b['content']):,}"
        notes.append(f"{counts}; the difference is over these")
    return {
        "kind": "windows",
        "num_windows": len(here),
        "num_windows_worse": int((difference_W > 0).sum()),
        "same_bits": bool((difference_W == 0).all()),
        **paired_figures(difference_W, tokens_W, document_W),
        "domains": _domains(difference_W, tokens_W, document_W, domain_W),
        "documents": _documents(difference_W, tokens_W, document_W, num_worst),
        "worse_windows": _worse(base, other, (there, here), difference_W / tokens_W, num_worst),
    }


def paired_figures(difference_W: FloatArray, tokens_W: IntArray, document_W: IntArray) -> dict[str, Any]:
    """Return the difference of windows with its interval and p-value; each None with too few blocks."""
    blocks, difference = paired_blocks(difference_W, tokens_W, document_W)
    half, stderr = blocks.half_width_95(), blocks.ce_loss_stderr()
    found = _ratio(difference, half)
    return found | {
        "ce_loss_difference_stderr": stderr,
        "num_blocks": blocks.num_blocks,
        "p_value": _p_value(difference, stderr, blocks.num_blocks),
    }


def _p_value(difference: float, stderr: float | None, num_blocks: int) -> float | None:
    if stderr is None or num_blocks < FEWEST_BLOCKS:
        return None
    if stderr == 0:
        return 1.0 if difference == 0 else 0.0
    return two_sided_p(difference / stderr, num_blocks - 1)


def _ratio(difference: float, half: float | None = None) -> dict[str, Any]:
    ends = None if half is None else [difference - half, difference + half]
    return {
        "perplexity_ratio": _exp(difference),
        "perplexity_ratio_interval_95": None if ends is None else [_exp(end) for end in ends],
        "ce_loss_difference": difference,
        "ce_loss_difference_interval_95": ends,
    }


def _exp(value: float) -> float | str:
    found = exp_or_infinity(value)
    return "Infinity" if math.isinf(found) else found


def _domains(
    difference_W: FloatArray, tokens_W: IntArray, document_W: IntArray, domain_W: npt.NDArray[Any]
) -> dict[str, Any]:
    names = np.unique(domain_W)
    if len(names) < 2:
        return {}
    found = {}
    for name in names.tolist():
        own = domain_W == name
        found[name] = {
            "num_windows": int(own.sum()),
            **paired_figures(difference_W[own], tokens_W[own], document_W[own]),
        }
    for part, adjusted in zip(
        found.values(), holm([part["p_value"] for part in found.values()]), strict=True
    ):
        part["p_value_holm"] = adjusted
    return found


def _documents(
    difference_W: FloatArray, tokens_W: IntArray, document_W: IntArray, num_worst: int
) -> dict[str, Any]:
    document_D, first_D = np.unique(document_W, return_index=True)
    nll_D = np.add.reduceat(difference_W, first_D)
    per_token_D = nll_D / np.add.reduceat(tokens_W, first_D)
    worst = [index for index in np.argsort(-per_token_D, kind="stable")[:num_worst] if per_token_D[index] > 0]
    return {
        "num_documents": len(document_D),
        "num_worse": int((nll_D > 0).sum()),
        "num_better": int((nll_D < 0).sum()),
        "worst": [
            {"document": int(document_D[index]), "ce_loss_difference": float(per_token_D[index])}
            for index in worst
        ],
    }


def _worse(
    base: Run, other: Run, shared: tuple[IntArray, IntArray], per_token_W: FloatArray, num_worst: int
) -> list[dict[str, Any]]:
    assert base.windows is not None
    assert other.windows is not None
    order = [index for index in np.argsort(-per_token_W, kind="stable")[:num_worst] if per_token_W[index] > 0]
    texts = {}
    ids = {
        run.name: [int(run.windows["window_id"][at[i]]) for i in order]
        for run, at in _sides(base, other, shared)
    }
    for run, _ in reversed(_sides(base, other, shared)):
        tokens = run.tokens_of(ids[run.name])
        for place, window in enumerate(ids[run.name]):
            if place not in texts and window in tokens:
                texts[place] = plain_text(run, tokens[window])
    there, here = shared
    found = []
    for place, index in enumerate(order):
        a, b = there[index], here[index]
        found.append(
            {
                "window_id": int(other.windows["window_id"][b]),
                "document": int(other.windows["document"][b]),
                "domain": str(other.windows["domain"][b]),
                "score_start": int(other.windows["score_start"][b]),
                "stop": int(other.windows["stop"][b]),
                "base_ce_loss": float(base.windows["nll_sum"][a] / base.windows["num_tokens"][a]),
                "ce_loss": float(other.windows["nll_sum"][b] / other.windows["num_tokens"][b]),
                "ce_loss_difference": float(per_token_W[index]),
                "text": texts.get(place),
            }
        )
    return found


def _sides(base: Run, other: Run, shared: tuple[IntArray, IntArray]) -> list[tuple[Any, IntArray]]:
    return [(base, shared[0]), (other, shared[1])]


def _by_bytes(base: Run, other: Run, notes: list[str]) -> dict[str, Any]:
    """Compare runs of different tokenizers: bits per byte of the same text, document by document."""
    why = "the tokenizers differ: perplexities and KL divergences cannot be compared"
    texts = [run.result["dataset"]["fingerprint"].get("text_sha256") for run in (base, other)]
    bits = [run.result.get("bits_per_byte") for run in (base, other)]
    if texts[0] is None or texts[0] != texts[1]:
        return {"kind": "incomparable", "why": [why, "the texts differ too, so bits per byte say nothing"]}
    if bits[0] is None or bits[1] is None:
        return {"kind": "incomparable", "why": [why, "bits per byte are not known for both runs"]}
    found: dict[str, Any] = {"kind": "bytes", "why": [why], "base_bits_per_byte": bits[0]}
    if base.documents is None or other.documents is None:
        notes.append("no interval: it needs documents.parquet (per_document=true) in both runs")
        return found | {
            "bits_per_byte_difference": bits[1] - bits[0],
            "bits_per_byte_difference_interval_95": None,
        }
    a, b = base.documents, other.documents
    _, here, there = np.intersect1d(b["document"], a["document"], return_indices=True)
    same = b["num_bytes"][here] == a["num_bytes"][there]
    if not same.all():
        notes.append(
            f"{int((~same).sum()):,} documents whose windows cover other bytes in the two runs are left out"
        )
    here, there = here[same], there[same]
    if not len(here):
        return {"kind": "incomparable", "why": [why, "no document is covered to the same byte by both runs"]}
    bits_D = (b["nll_sum"][here] - a["nll_sum"][there]) / math.log(2)
    documents = np.arange(len(here), dtype=np.int64)
    blocks, difference = paired_blocks(bits_D, b["num_bytes"][here].astype(np.int64), documents)
    half, stderr = blocks.half_width_95(), blocks.ce_loss_stderr()
    return found | {
        "bits_per_byte_difference": difference,
        "bits_per_byte_difference_interval_95": None
        if half is None
        else [difference - half, difference + half],
        "bits_per_byte_difference_stderr": stderr,
        "num_documents": len(here),
        "num_documents_worse": int((bits_D > 0).sum()),
        "p_value": _p_value(difference, stderr, blocks.num_blocks),
    }


def check_gate(
    found: Mapping[str, Any], max_kl: float | None, max_ppl_ratio: float | None
) -> tuple[list[str], list[str]]:
    """Hold a comparison against limits.

    Returns:
        What exceeds a limit, and what cannot be held against one; a line each.
    """
    over, unknown = [], []
    for entry in found["comparisons"]:
        name = entry["name"]
        if max_ppl_ratio is not None:
            ratio = entry.get("perplexity_ratio")
            if ratio is None:
                unknown.append(f"{name}: there is no perplexity ratio, because {'; '.join(entry['why'])}")
            elif float(ratio) > max_ppl_ratio:
                over.append(f"{name}: perplexity ratio {float(ratio):.6f} is above {max_ppl_ratio:g}")
        if max_kl is not None:
            kl = entry.get("kl")
            if kl is None:
                unknown.append(
                    f"{name}: there is no KL divergence in its result; run it with a reference section"
                )
            elif not kl["reference_is_base"]:
                unknown.append(f"{name}: its KL divergence is not from the base, but from another reference")
            elif kl["kl_mean"] > max_kl:
                over.append(f"{name}: mean KL divergence {kl['kl_mean']:.6f} is above {max_kl:g}")
    return over, unknown
