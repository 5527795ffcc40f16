"""Which files of a folder are the checkpoint: named in the config, found by name, or in a training run's last
epoch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing import FormattedCheckpointFiles

from ppl_eval.checkpoints.inside import inside_folder
from ppl_eval.config.files import read_json_object

# How a folder's weight files are found when `checkpoint_files` names none, in this order.
FOUND_BY_NAME = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    # torchtune's Meta and torchtune checkpointers write this one, without an index.
    "model-00001-of-00001.bin",
)
ADAPTER_FILES = ("adapter_model.pt", "adapter_model.safetensors", "adapter_model.bin")


def weights_folder(cfg: Mapping[str, Any], notes: list[str]) -> Path:
    """Return ``checkpoint_dir``, or the last epoch inside it when it is the output folder of a training
    run.
    """
    if not cfg.get("checkpoint_dir"):
        raise ValueError("checkpointer.checkpoint_dir is missing: the folder that holds the weights")
    folder = Path(str(cfg["checkpoint_dir"])).expanduser()
    if not folder.is_dir():
        hint = ""
        if folder.parent.name == "models" and folder.name == "smollm2-135m":
            hint = "; `ppl-eval fetch smollm2-135m` gets the demo model"
        raise ValueError(f"checkpointer.checkpoint_dir {folder} is not a folder{hint}")
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


def weight_paths(cfg: Mapping[str, Any], folder: Path) -> list[Path]:
    """Return the weight files, sorted by name as torchtune does."""
    files = cfg.get("checkpoint_files")
    paths = _named_files(files, folder) if files else _found_files(folder)
    if not paths:
        adapter = next((name for name in ADAPTER_FILES if (folder / name).is_file()), None)
        if adapter:
            raise ValueError(
                f"{folder} holds an adapter ({adapter}) and no weights: set checkpoint_dir to the base"
                f" model's folder and checkpointer.adapter_checkpoint to {folder}"
            )
        if (folder / ".metadata").is_file() or any(folder.glob("*.distcp")):
            raise ValueError(
                f"{folder} is a distributed checkpoint of torch (.distcp files), which is not read: make one"
                f" file of it by `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder}"
                " weights.pt` and name that in checkpointer.checkpoint_dir and checkpoint_files, with the"
                " checkpointer of the form that its names have"
            )
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
    return [inside_folder(folder, name, "checkpointer.checkpoint_files") for name in names]


def _found_files(folder: Path) -> list[Path]:
    for name in FOUND_BY_NAME:
        path = folder / name
        if path.is_file():
            inside_folder(folder, name, str(folder))
            if not name.endswith(".index.json"):
                return [path]
            return _files_of_index(path)
    return []


def _files_of_index(path: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        ValueError: if it is damaged, or names a file outside its folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path} has no weight_map from names of tensors to files; download or copy it again"
        )
    names = {value for value in weight_map.values() if isinstance(value, str)}
    if len(names) < len({str(value) for value in weight_map.values()}):
        raise ValueError(f"{path}: its weight_map has files that are no text; download or copy it again")
    return [inside_folder(path.parent, name, str(path)) for name in sorted(names)]
