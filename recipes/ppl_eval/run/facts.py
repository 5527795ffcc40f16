"""All that decides the bits of a run: ranks agree on it, and records of finished windows belong to it."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from ppl_eval.config.environment import kernel_facts, versions
from ppl_eval.config.settings import Settings
from ppl_eval.metrics import window_records
from ppl_eval.run.state import RunState, Source

_KEYS = (
    "batch_size",
    "dtype",
    "compile",
    "max_logits_mib",
    "softmax",
    "position_buckets",
    "tensor_parallel_dim",
    "context_parallel_dim",
)


def input_facts(settings: Settings, source: Source, device: torch.device) -> dict[str, Any]:
    """Return what decides the bits and is known before weights are read; JSON values.

    Values are the resolved ones: what an interpolation stands for may differ between hosts. Data parallelism
    and FSDP are not among them, because they change no bit.
    """
    given, inputs, known = settings.as_dict(), source.inputs, versions()
    return {
        "data": inputs.data.fingerprint,
        "tokenizer": inputs.encoder.sha256,
        "protocol": {"name": inputs.protocol.name, **inputs.protocol.parameters},
        "prefix_token": inputs.prefix_token,
        "num_windows": inputs.plan.num_windows,
        # A model's folder may lie elsewhere on another host; its config.json is known by its hash.
        "model": {name: value for name, value in given["model"].items() if name != "path"},
        "config.json": _hash_of(source.checkpoint.hf_config),
        "corrections": list(source.model_notes),
        # As written: its calibration text may lie elsewhere on another host.
        "quantizer": settings.written.get("quantizer"),
        "tensor_parallel_plan": given.get("tensor_parallel_plan"),
        **{key: getattr(settings, key) for key in _KEYS},
        "device": device.type,
        "kernels": kernel_facts(device),
        "versions": {name: known[name] for name in ("torch", "torchtune", "torchao", "source")},
    }


def source_facts(
    settings: Sequence[Settings], sources: Sequence[Source], device: torch.device
) -> dict[str, Any]:
    """Return what ranks must agree on before weights are read, one source for each context length."""
    first, *others = [input_facts(own, source, device) for own, source in zip(settings, sources, strict=True)]
    source = sources[0]
    return {"seed": source.seed, "checkpoint": source.checkpoint.identity, **first, "lengths": others}


def plan_facts(state: RunState) -> dict[str, Any]:
    """Return everything that decides which windows there are and what bits they score; JSON values."""
    return {
        "record": window_records.VERSION,
        **input_facts(state.settings, state.source, state.device),
        "weights": state.weights_hash,
        # A ledger of windows without their tokens is of no use to a run that writes tokens.
        **({"per_token": True} if state.settings.per_token else {}),
        **state.model.facts(),
    }


def batch_dependence(state: RunState) -> str | None:
    """Return why the bits of a window may depend on its batch, in words; None where they do not
    (docs/exactness.md)."""
    if state.settings.compile:
        return "a compiler makes kernels by the shape of a batch"
    if state.dims.tp > 1 or state.dims.cp > 1:
        return "tensor and context parallelism cut a batch by its shape"
    return state.model.scorer.model.batch_dependence(state.device)


def _hash_of(value: Any) -> str | None:
    if value is None:
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
