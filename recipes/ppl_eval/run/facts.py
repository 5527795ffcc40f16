"""All that decides the bits of a run: ranks agree on it, and records of finished windows belong to it."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from ppl_eval.checkpoints.load import LoadedCheckpoint
from ppl_eval.config.environment import kernel_facts, versions
from ppl_eval.config.settings import Settings
from ppl_eval.metrics import window_records
from ppl_eval.run.reference import Reference
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
    inputs, known = source.inputs, versions()
    reference = source.reference
    return {
        "data": inputs.data.fingerprint,
        "tokenizer": inputs.encoder.sha256,
        "protocol": {"name": inputs.protocol.name, **inputs.protocol.parameters},
        "prefix_token": inputs.prefix_token,
        "num_windows": inputs.plan.num_windows,
        **_model_facts(settings, source.checkpoint, source.model_notes),
        # As written: its calibration text may lie elsewhere on another host.
        "quantizer": settings.written.get("quantizer"),
        **({} if reference is None else {"reference": _reference_facts(settings, reference)}),
        "tensor_parallel_plan": settings.as_dict().get("tensor_parallel_plan"),
        **{key: getattr(settings, key) for key in _KEYS},
        "device": device.type,
        "kernels": kernel_facts(device),
        "versions": {name: known[name] for name in ("torch", "torchtune", "torchao", "source")},
    }


def _model_facts(settings: Settings, checkpoint: LoadedCheckpoint, notes: Sequence[str]) -> dict[str, Any]:
    model = OmegaConf.to_container(settings.model, resolve=True)
    assert isinstance(model, dict)
    return {
        # A model's folder may lie elsewhere on another host; its config.json is known by its hash.
        "model": {name: value for name, value in model.items() if name != "path"},
        "config.json": _hash_of(checkpoint.hf_config),
        "corrections": list(notes),
    }


def _reference_facts(settings: Settings, reference: Reference) -> dict[str, Any]:
    written = settings.written.get("reference")
    return {
        **_model_facts(reference.settings, reference.checkpoint, reference.notes),
        "quantizer": written.get("quantizer") if isinstance(written, dict) else written,
    }


def source_facts(
    settings: Sequence[Settings], sources: Sequence[Source], device: torch.device
) -> dict[str, Any]:
    """Return what ranks must agree on before weights are read, one source for each context length."""
    first, *others = [input_facts(own, source, device) for own, source in zip(settings, sources, strict=True)]
    source = sources[0]
    checkpoints = {"checkpoint": source.checkpoint.identity}
    if source.reference is not None:
        checkpoints["checkpoint of the reference"] = source.reference.checkpoint.identity
    return {"seed": source.seed, **checkpoints, **first, "lengths": others}


def plan_facts(state: RunState) -> dict[str, Any]:
    """Return everything that decides which windows there are and what bits they score; JSON values."""
    return {
        "record": window_records.VERSION,
        **input_facts(state.settings, state.source, state.device),
        "weights": state.weights_hash,
        **({} if state.reference_hash is None else {"weights of the reference": state.reference_hash}),
        # A ledger of windows without their tokens is of no use to a run that writes tokens.
        **({"per_token": True} if state.settings.per_token else {}),
        **{name: value for name, value in state.model.facts().items() if name != "reference"},
        **(
            {}
            if state.model.reference is None
            else {"engine of the reference": state.model.reference.facts()}
        ),
    }


def batch_dependence(state: RunState) -> str | None:
    """Return why the bits of a window may depend on its batch, in words; None where they do not
    (docs/exactness.md)."""
    if state.settings.compile:
        return "a compiler makes kernels by the shape of a batch"
    if state.dims.tp > 1 or state.dims.cp > 1:
        return "tensor and context parallelism cut a batch by its shape"
    found = [scorer.model.batch_dependence(state.device) for scorer in state.model.scorers]
    return next((reason for reason in found if reason is not None), None)


def _hash_of(value: Any) -> str | None:
    if value is None:
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
