"""The `checkpointer` section of a torchtune config, read without building torchtune's checkpointer.

torchtune's own classes read the whole state dict on every rank and demand an output folder they can write
to. Only names are taken from the section here; nothing is written. Weights come out under torchtune's names,
read on demand.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtune.training.checkpointing import FormattedCheckpointFiles

from ppl_eval.checkpoint_files import read_torch_file, sampled_sha256
from ppl_eval.checkpoint_forms import FORMS, convert, index_files
from ppl_eval.weights import LazyStateDict, is_quantized

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
)
# How a folder's weight files are found when `checkpoint_files` names none, in this order.
FOUND_BY_NAME = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
RECIPE_STATE_PLACES = ("recipe_state.pt", "recipe_state/recipe_state.pt", "../recipe_state/recipe_state.pt")


@dataclass
class LoadedCheckpoint:
    """A checkpoint opened for reading.

    Attributes:
        state_dict: weights under torchtune's names; read and converted one at a time when asked for.
        recipe_state: the plain values (seed, epochs_run, ...) of the training recipe's state, or None.
        hf_config: content of config.json, or None where the folder has none.
        identity: cheap fingerprint; ranks that opened the same checkpoint have equal ones.
        quantized: whether some weights are already quantised.
        notes: everything the person should know about what was read.
    """

    state_dict: LazyStateDict
    recipe_state: dict[str, Any] | None
    hf_config: dict[str, Any] | None
    identity: dict[str, Any]
    quantized: bool
    notes: list[str] = field(default_factory=list)


def load_state_dict(cfg: Mapping[str, Any]) -> LoadedCheckpoint:
    """Opens the checkpoint that a `checkpointer` section names.

    Args:
        cfg: the section, in torchtune's keys: `_component_`, `checkpoint_dir`, `checkpoint_files` (a list,
            torchtune's {filename_format, max_filename}, or nothing: found by name), `model_type`,
            `recipe_checkpoint`; and ours: `allow_unsafe_pickle`.

    Raises:
        ValueError: unknown key or component, missing, truncated or corrupt file, or one that would have to
            run code.
    """
    notes: list[str] = []
    form = _form(cfg)
    folder = _weights_folder(cfg, notes)
    paths = _weight_paths(cfg, folder)
    unsafe = bool(cfg.get("allow_unsafe_pickle", False))
    hf_config = _read_hf_config(folder)
    stored = index_files(paths, allow_unsafe_pickle=unsafe, notes=notes)
    state_dict = convert(
        stored, form=form, model_type=str(cfg.get("model_type", "")), hf_config=hf_config, notes=notes
    )
    recipe_state = _read_recipe_state(cfg, folder, allow_unsafe_pickle=unsafe, notes=notes)
    return LoadedCheckpoint(
        state_dict=state_dict,
        recipe_state=recipe_state,
        hf_config=hf_config,
        identity={p.name: {"bytes": p.stat().st_size, "sampled_sha256": sampled_sha256(p)} for p in paths},
        quantized=any(is_quantized(t) for t in state_dict.meta.values()),
        notes=notes,
    )


def _form(cfg: Mapping[str, Any]) -> str:
    """The file form that `_component_` stands for; also refuses keys that nobody reads."""
    unknown = sorted(set(map(str, cfg)) - set(KNOWN_KEYS))
    if unknown:
        raise ValueError(f"checkpointer has unknown keys {unknown}; known are {', '.join(KNOWN_KEYS)}")
    component = str(cfg.get("_component_", ""))
    form = FORMS.get(component.rpartition(".")[2])
    if form is None:
        allowed = ", ".join(f"torchtune.training.{name}" for name in FORMS)
        raise ValueError(f"checkpointer._component_ is {component!r}; it can be one of {allowed}")
    return form


def _weights_folder(cfg: Mapping[str, Any], notes: list[str]) -> Path:
    """`checkpoint_dir`, or the last epoch inside it when it is the output folder of a training run."""
    if not cfg.get("checkpoint_dir"):
        raise ValueError("checkpointer.checkpoint_dir is missing: the folder that holds the weights")
    folder = Path(str(cfg["checkpoint_dir"])).expanduser()
    if not folder.is_dir():
        raise ValueError(f"checkpointer.checkpoint_dir {folder} is not a folder")
    epochs = {
        int(path.name.removeprefix("epoch_")): path
        for path in folder.glob("epoch_*")
        if path.is_dir() and path.name.removeprefix("epoch_").isdigit()
    }
    files = cfg.get("checkpoint_files")
    here = _named_files(files, folder) if files else _found_files(folder)
    if epochs and not any(path.is_file() for path in here):
        last = max(epochs)
        notes.append(
            f"checkpoint_dir {folder.name} holds {len(epochs)} epochs: the last one, epoch_{last}, was taken"
        )
        return epochs[last]
    return folder


def _weight_paths(cfg: Mapping[str, Any], folder: Path) -> list[Path]:
    """The weight files, sorted by name as torchtune does."""
    files = cfg.get("checkpoint_files")
    paths = _named_files(files, folder) if files else _found_files(folder)
    if not paths:
        names = ", ".join(FOUND_BY_NAME)
        raise ValueError(
            f"no weights in {folder}: none of {names}; name the files in checkpointer.checkpoint_files"
        )
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        there = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        )
        raise ValueError(
            f"{len(absent)} of {len(paths)} checkpoint files are missing in {folder}: "
            f"{', '.join(absent[:10])}; "
            f"weight files there: {', '.join(there[:10]) or 'none'}"
        )
    return sorted(paths)


def _named_files(files: Any, folder: Path) -> list[Path]:
    if isinstance(files, Mapping):
        names = FormattedCheckpointFiles.from_dict(dict(files)).build_checkpoint_filenames()
    elif isinstance(files, str):
        names = [files]
    else:
        names = [str(name) for name in files]
    return [folder / name for name in names]


def _found_files(folder: Path) -> list[Path]:
    for name in FOUND_BY_NAME:
        path = folder / name
        if path.is_file():
            if not name.endswith(".index.json"):
                return [path]
            weight_map = json.loads(path.read_text(encoding="utf-8")).get("weight_map", {})
            return [folder / file for file in sorted(set(weight_map.values()))]
    return []


def _read_hf_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} is no JSON: {e}") from e


def _read_recipe_state(
    cfg: Mapping[str, Any], folder: Path, *, allow_unsafe_pickle: bool, notes: list[str]
) -> dict[str, Any] | None:
    """The training recipe's state beside the weights; tensors (optimizer, random state) are dropped unread.

    `recipe_checkpoint` is looked for as a path, in the weights' folder, in the folder above it and in
    `output_dir`; without it, at the places where torchtune writes it.
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
