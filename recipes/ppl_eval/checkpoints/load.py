"""The ``checkpointer`` section of a torchtune config, read without building torchtune's checkpointer.

torchtune's own classes read the whole state dict on every rank and demand an output folder they can write
to. Only names are taken from the section here; nothing is written. Weights come out under torchtune's names,
read on demand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoints.adapter import find_adapter, merge_adapter, refuse_same_epoch
from ppl_eval.checkpoints.convert import FORMS, convert, index_files
from ppl_eval.checkpoints.folder import ADAPTER_FILES, weight_paths, weights_folder
from ppl_eval.checkpoints.gguf import read_gguf
from ppl_eval.checkpoints.inside import inside_folder
from ppl_eval.checkpoints.lazy_state_dict import LazyStateDict
from ppl_eval.checkpoints.meta_config import meta_config
from ppl_eval.checkpoints.packed_weights import KEY as DEQUANTIZE
from ppl_eval.checkpoints.packed_weights import packing_of, unpack
from ppl_eval.checkpoints.quantized_tensors import is_quantized
from ppl_eval.checkpoints.safetensors import sampled_sha256
from ppl_eval.checkpoints.torch_files import read_torch_file
from ppl_eval.config.files import read_json_object
from ppl_eval.models import live
from ppl_eval.models.families import OWN_NAMES, check_architecture
from ppl_eval.models.hf_config import HFConfig

# torchtune's keys (the last five steer writing and resuming, which an evaluation does not do), then ours.
KNOWN_KEYS = (
    "_component_",
    "checkpoint_dir",
    "checkpoint_files",
    "model_type",
    "recipe_checkpoint",
    "adapter_checkpoint",
    "output_dir",
    "safe_serialization",
    "resume_from_checkpoint",
    "should_load_recipe_state",
    "keep_last_n_checkpoints",
    "allow_unsafe_pickle",
    "lora_alpha",
    DEQUANTIZE,
)
RECIPE_STATE_PLACES = ("recipe_state.pt", "recipe_state/recipe_state.pt", "../recipe_state/recipe_state.pt")


@dataclass
class LoadedCheckpoint:
    """A checkpoint opened for reading.

    Attributes:
        state_dict: weights under torchtune's names; read and converted one at a time when asked for.
        recipe_state: the plain values (seed, epochs_run, ...) of the training recipe's state, or None.
        hf_config: content of config.json, or what stands for it (a GGUF file's metadata, Meta's params.json);
            None where there is neither.
        identity: cheap fingerprint; ranks that opened the same checkpoint have equal ones.
        quantized: whether some weights are already quantised.
        packing: how weights are packed that are dequantised while they are read, or None.
        notes: everything the person should know about what was read.
    """

    state_dict: LazyStateDict
    recipe_state: dict[str, Any] | None
    hf_config: HFConfig | None
    identity: dict[str, Any]
    quantized: bool
    packing: str | None = None
    notes: list[str] = field(default_factory=list)


def load_state_dict(cfg: Mapping[str, Any]) -> LoadedCheckpoint:
    """Open the checkpoint that a ``checkpointer`` section names; of a model in memory there is none.

    Args:
        cfg: the section, in torchtune's keys: ``_component_``, ``checkpoint_dir``, ``checkpoint_files`` (a
            list, torchtune's {filename_format, max_filename}, or nothing: found by name), ``model_type``,
            ``recipe_checkpoint``, ``adapter_checkpoint``; and ours: ``allow_unsafe_pickle``, ``lora_alpha``
            (of an adapter without adapter_config.json), ``dequantize`` (see ``packed_weights``). A file
            that ends in .gguf is read as what it is.

    Raises:
        ValueError: for an unknown key or component, missing, truncated or corrupt file, or one that would
            have to run code.
    """
    if live.is_lent():
        return LoadedCheckpoint(LazyStateDict(), None, None, identity={}, quantized=False)
    notes: list[str] = []
    form = _form(cfg)
    folder = weights_folder(cfg, notes)
    paths = weight_paths(cfg, folder)
    model_type = str(cfg.get("model_type", ""))
    unsafe = bool(cfg.get("allow_unsafe_pickle", False))
    state_dict, hf_config, method = _open_weights(cfg, folder, form, paths, notes)
    quantized = any(is_quantized(t) for t in state_dict.meta.values())
    adapter = _adapter(cfg, folder, notes)
    if adapter:
        if model_type == OWN_NAMES:
            raise ValueError(
                f"checkpointer.adapter_checkpoint cannot be used with model_type {OWN_NAMES}: merge the"
                " adapter into its base first (PEFT's merge_and_unload), and evaluate what it saves"
            )
        if quantized:
            raise ValueError("an adapter cannot be merged into quantised weights: merge first, then quantise")
        merge_adapter(
            state_dict,
            adapter,
            model_type=model_type,
            hf_config=hf_config,
            alpha=cfg.get("lora_alpha"),
            allow_unsafe_pickle=unsafe,
            notes=notes,
        )
        paths.append(adapter)
    return LoadedCheckpoint(
        state_dict=state_dict,
        recipe_state=_read_recipe_state(cfg, folder, allow_unsafe_pickle=unsafe, notes=notes),
        hf_config=hf_config,
        identity={p.name: {"bytes": p.stat().st_size, "sampled_sha256": sampled_sha256(p)} for p in paths},
        quantized=quantized,
        packing=method,
        notes=notes,
    )


def _open_weights(
    cfg: Mapping[str, Any], folder: Path, form: str, paths: list[Path], notes: list[str]
) -> tuple[LazyStateDict, HFConfig | None, str | None]:
    """Return weights under torchtune's names, what describes the model, and how the weights are packed."""
    model_type = str(cfg.get("model_type", ""))
    hf_config = _read_hf_config(folder)
    if hf_config and "model_type" in hf_config and model_type != OWN_NAMES:
        # Before a converter meets keys that it does not know, and says so in its own words.
        check_architecture(hf_config)
    packing, first = packing_of(hf_config, folder), paths[0]
    if packing and (form != "hf" or first.suffix == ".gguf"):
        raise ValueError(
            f"{folder} has weights quantised by {packing['quant_method']} (config.json, or the file of"
            f" settings beside it), and {first.name} is in another form: move it to a folder of its own"
        )
    if first.suffix == ".gguf":
        if len(paths) > 1:
            raise ValueError(f"checkpointer.checkpoint_files: {len(paths)} GGUF files; a model is one")
        named, hf_config, kinds = read_gguf(first, model_type=model_type, beside=hf_config, notes=notes)
        return convert(named, form="hf", model_type=model_type, hf_config=hf_config), hf_config, kinds
    unsafe = bool(cfg.get("allow_unsafe_pickle", False))
    stored = index_files(paths, form=form, allow_unsafe_pickle=unsafe, notes=notes)
    unpacked = unpack(stored, packing, weights_only=bool(cfg.get(DEQUANTIZE, False)))
    notes += unpacked.notes
    state_dict = convert(unpacked.stored, form=form, model_type=model_type, hf_config=hf_config)
    if form == "meta":
        embedding = state_dict.meta.get("tok_embeddings.weight")
        vocab_size = None if embedding is None else embedding.shape[0]
        hf_config = meta_config(
            folder, model_type=model_type, vocab_size=vocab_size, beside=hf_config, notes=notes
        )
    return state_dict, hf_config, unpacked.method


def _form(cfg: Mapping[str, Any]) -> str:
    """Return the file form that ``_component_`` stands for, and refuse keys that nothing reads."""
    unknown = sorted(set(map(str, cfg)) - set(KNOWN_KEYS))
    if unknown:
        raise ValueError(f"checkpointer has unknown keys {unknown}; known are {', '.join(KNOWN_KEYS)}")
    component = str(cfg.get("_component_", ""))
    form = FORMS.get(component.rpartition(".")[2])
    if form is None:
        allowed = ", ".join(f"torchtune.training.{name}" for name in FORMS)
        raise ValueError(f"checkpointer._component_ is {component!r}; it can be one of {allowed}")
    return form


def _adapter(cfg: Mapping[str, Any], folder: Path, notes: list[str]) -> Path | None:
    """Return the adapter to merge, or None; note one beside the weights that the config does not name."""
    named = cfg.get("adapter_checkpoint")
    if not named:
        beside = next((name for name in ADAPTER_FILES if (folder / name).is_file()), None)
        if beside:
            notes.append(
                f"{beside} is beside the weights and was not merged: torchtune's weights contain it already"
                " (checkpointer.adapter_checkpoint merges one)"
            )
        return None
    path = find_adapter(str(named), [Path(), folder, folder.parent, Path(str(cfg.get("output_dir") or "."))])
    refuse_same_epoch(path, folder)
    return path


def _read_hf_config(folder: Path) -> HFConfig | None:
    path = inside_folder(folder, "config.json", str(folder))
    return read_json_object(path) if path.is_file() else None


def _read_recipe_state(
    cfg: Mapping[str, Any], folder: Path, *, allow_unsafe_pickle: bool, notes: list[str]
) -> dict[str, Any] | None:
    """Read the training recipe's state beside the weights; tensors (optimizer, random state) are left out.

    ``recipe_checkpoint`` is looked for as a path, in the weights' folder, in the folder above it and in
    ``output_dir``; without it, at the places where torchtune writes it.
    """
    named = cfg.get("recipe_checkpoint")
    if named:
        bases = [
            Path(),
            folder,
            folder.parent,
            folder.parent / "recipe_state",
            Path(str(cfg.get("output_dir") or ".")),
        ]
        candidates = [base / str(named) for base in bases]
    else:
        # torchtune keeps one recipe state for all epochs, beside their folders.
        places = RECIPE_STATE_PLACES if folder.name.startswith("epoch_") else RECIPE_STATE_PLACES[:2]
        candidates = [folder / place for place in places]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        if named:
            raise ValueError(
                f"checkpointer.recipe_checkpoint {named} was not found in {', '.join(map(str, bases))}"
            )
        return None
    content = read_torch_file(path, allow_unsafe_pickle=allow_unsafe_pickle, notes=notes)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path} holds a {type(content).__name__}, not the mapping that a training recipe writes"
        )
    plain = {str(k): v for k, v in content.items() if v is None or isinstance(v, bool | int | float | str)}
    for key, value in content.items():  # newer recipes store the seed as a one-element tensor
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            plain[str(key)] = value.item()
    notes.append(
        f"recipe state {path.name} read: "
        f"{', '.join(f'{k}={v}' for k, v in sorted(plain.items())) or 'no values'}"
    )
    return plain
