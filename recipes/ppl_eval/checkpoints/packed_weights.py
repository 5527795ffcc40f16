"""Quantised files as they are published: every packed weight becomes one that is dequantised when it is read.

``quantization_config`` of config.json (or the file beside it that older tools wrote) names the method. Names
stay Hugging Face's, so converters and the model's check see ordinary weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppl_eval.checkpoints import (
    from_awq,
    from_bitsandbytes,
    from_compressed_tensors,
    from_fp8,
    from_gptq,
)
from ppl_eval.checkpoints.inside import inside_folder
from ppl_eval.checkpoints.packed_values import PackedWeight, Stored
from ppl_eval.checkpoints.safetensors import StoredTensor
from ppl_eval.config.files import read_json_object

KEY = "dequantize"
SHOWN = 6


class Method(NamedTuple):
    """One way to publish quantised weights.

    Attributes:
        find: the quantised weights among a checkpoint's tensors.
        activations: what a config says is done to activations, or None; left out, nothing ever is.
    """

    find: Callable[[Stored, dict[str, Any]], list[PackedWeight]]
    activations: Callable[[dict[str, Any]], str | None] = lambda _: None


METHODS = {
    "compressed-tensors": Method(from_compressed_tensors.find, from_compressed_tensors.activations),
    "gptq": Method(from_gptq.find),
    "awq": Method(from_awq.find),
    "fp8": Method(from_fp8.find, from_fp8.activations),
    "fbgemm_fp8": Method(from_fp8.find, from_fp8.activations),
    "mxfp4": Method(from_fp8.find_mxfp4),
    "bitsandbytes": Method(from_bitsandbytes.find, from_bitsandbytes.activations),
}
# Where tools wrote the section before config.json had one, and the method where the file names none.
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True)
class Unpacked:
    """A checkpoint whose packed weights are dequantised when they are read.

    Attributes:
        stored: all its tensors, under the same names.
        method: how they are packed, for the result; None where nothing is.
        notes: what the person should know.
    """

    stored: dict[str, StoredTensor]
    method: str | None
    notes: list[str]


def packing_of(hf_config: Mapping[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """Return what config.json, or a file beside it, says about the packing of the weights.

    Raises:
        ValueError: for a damaged file, or a section that is no object.
    """
    section = (hf_config or {}).get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"quantization_config in config.json is {section!r}, not an object with keys")
    if section:
        method = section.get("quant_method")
        if method is None and (section.get("load_in_4bit") or section.get("load_in_8bit")):
            method = "bitsandbytes"
        return {**section, "quant_method": method or "an unnamed method"}
    for name, method in BESIDE.items():
        path = inside_folder(folder, name, str(folder))
        if path.is_file():
            return {"quant_method": method, **read_json_object(path)}
    return None


def unpack(stored: Stored, packing: dict[str, Any] | None, *, weights_only: bool) -> Unpacked:
    """Replace packed weights by weights that are dequantised, in float32, when they are read.

    Args:
        stored: the tensors of a checkpoint under Hugging Face's names.
        packing: what ``packing_of`` returned.
        weights_only: whether a model that quantises activations too is to be scored without that.

    Raises:
        ValueError: for a method that is not read, tensors that contradict it, or activations that are
            quantised, unless ``weights_only``.
    """
    if packing is None:
        return Unpacked(dict(stored), None, [])
    name = str(packing["quant_method"])
    method = METHODS.get(name)
    if method is None:
        raise ValueError(
            f"the weights are quantised by {name} (quantization_config in config.json), which is not read;"
            f" {', '.join(METHODS)} and GGUF files are: take one of those, or the full-precision checkpoint"
            " with `quantizer`"
        )
    activations = method.activations(packing)
    if activations and not weights_only:
        raise ValueError(
            f"the model is quantised by {name}, and not its weights only: {activations}. Here activations"
            f" stay in the run's dtype, which gives another number; set checkpointer.{KEY}=true to score the"
            " dequantised weights all the same"
        )
    found = method.find(stored, packing)
    if not found:
        raise ValueError(
            f"quantization_config says {name}, but the checkpoint holds no weight that it packed"
        )
    parts = {part for weight in found for part in weight.parts}
    rest = {part: tensor for part, tensor in stored.items() if part not in parts}
    twice = [weight.name for weight in found if weight.name in rest]
    if twice:
        raise ValueError(f"the checkpoint has {twice[0]} both packed and in full precision; which is meant?")
    unpacked = {
        weight.name: StoredTensor(torch.empty(weight.shape, dtype=torch.float32, device="meta"), weight.read)
        for weight in found
    }
    notes = _describe(name, found, rest)
    if activations:
        notes.append(f"checkpointer.{KEY}: only weights are scored as published; in use, {activations}")
    return Unpacked({**rest, **unpacked}, f"{name}: {_schemes(found)}", notes)


def _schemes(found: list[PackedWeight]) -> str:
    counts: dict[str, int] = {}
    for weight in found:
        counts[weight.scheme] = counts.get(weight.scheme, 0) + 1
    return "; ".join(f"{num} weights {scheme}" for scheme, num in counts.items())


def _describe(name: str, found: list[PackedWeight], rest: Mapping[str, StoredTensor]) -> list[str]:
    whole = [
        part.removesuffix(".weight")
        for part, tensor in rest.items()
        if tensor.meta.dim() > 1 and part.endswith(".weight") and "embed" not in part
    ]
    notes = [f"dequantised from {name}: {_schemes(found)}"]
    if whole:
        more = f" and {len(whole) - SHOWN} more" if len(whole) > SHOWN else ""
        notes.append(f"not quantised in the checkpoint: {', '.join(whole[:SHOWN])}{more}")
    return notes
