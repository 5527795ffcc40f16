"""What a config leaves to the checkpoint's folder: the folder itself, if it is on a hub, tokenizer, context
length and dtype."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ppl_eval.checkpoints import hub
from ppl_eval.checkpoints.folder import weights_folder
from ppl_eval.config.files import read_json_object
from ppl_eval.config.settings import Settings
from ppl_eval.distributed.rendezvous import World
from ppl_eval.models import live
from ppl_eval.tokenization.folder import tokenizer_section

# Most tokens of a window that are taken where the config does not say: published models have up to 2^20, and
# memory grows with the length.
LONGEST = 2048
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")

OncePerNode = Callable[[str, Callable[[], str]], str]


def filled(settings: Settings, once_per_node: OncePerNode = lambda _, work: work()) -> Settings:
    """Return settings without a key that is left to the checkpoint's folder.

    Args:
        settings: the checked config.
        once_per_node: has one process of each node do what is slow (``World.once_per_node``).

    Raises:
        ValueError: if the folder does not say what is left to it, or is not to be had.
    """
    if live.is_lent():
        return settings
    config, notes = copy.deepcopy(settings.config), []
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, False)
    for section, key in (("checkpointer", "checkpoint_dir"), ("model", "path")):
        named = config[section].get(key)
        wanted = hub.parse(named) if isinstance(named, str) else None
        if wanted is not None:
            config[section][key] = once_per_node(f"{section}.{key}", partial(hub.download, *wanted))
            commit = (hub.snapshot_of(config[section][key]) or {}).get("commit")
            notes.append(f"{section}.{key}: {named} is commit {commit} of {wanted[0]}")
    missing = [key for key in ("tokenizer", "dtype", "protocol.max_seq_len") if _is_null(config, key)]
    if missing:
        folder = weights_folder(config.checkpointer, [])
        described = _read(folder, missing)
        if "dtype" in missing:
            config.dtype = _dtype_of(described)
            notes.append(f"dtype: {config.dtype}, as config.json has it")
        if "protocol.max_seq_len" in missing:
            config.protocol.max_seq_len, note = _length_of(described)
            notes.append(note)
        if "tokenizer" in missing:
            config.tokenizer = tokenizer_section(folder)
            if "generation_config_path" in config.tokenizer:
                notes.append("tokenizer: BOS and EOS of generation_config.json, for want of another file")
    values = {key: config[key] for key in ("checkpointer", "model", "tokenizer", "protocol")}
    dtype = config.get("dtype", settings.dtype)
    return replace(settings, config=config, notes=(*settings.notes, *notes), dtype=dtype, **values)


def fill_in(runs: Sequence[tuple[Settings, World]]) -> list[tuple[Settings, World]]:
    """Fill in the settings of every context length; the processes of each stay with it.

    Raises:
        ValueError: see ``filled``.
    """
    return [(filled(settings, world.once_per_node), world) for settings, world in runs]


def _is_null(config: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    place = config[section] if section else config
    return name in place and place[name] is None


def _read(folder: Path, missing: list[str]) -> Mapping[str, Any]:
    if missing == ["tokenizer"]:
        return {}
    if not (folder / "config.json").is_file():
        keys = " and ".join(key for key in missing if key != "tokenizer")
        raise ValueError(f"{keys}: null leaves it to config.json, and {folder} has none; write the value")
    described = read_json_object(folder / "config.json")
    # Models with several parts keep what is about the text in a section of its own.
    inner = described.get("text_config")
    return {**described, **inner} if isinstance(inner, dict) else described


def _dtype_of(described: Mapping[str, Any]) -> str:
    stated = described.get("dtype") or described.get("torch_dtype")
    found = _DTYPES.get(str(stated).removeprefix("torch."))
    if found is None:
        raise ValueError(
            f"dtype: null leaves it to config.json, whose dtype is {stated!r}; write one of"
            f" {', '.join(_DTYPES.values())}"
        )
    return found


def _length_of(described: Mapping[str, Any]) -> tuple[int, str]:
    found = next((described[key] for key in _LENGTHS if isinstance(described.get(key), int)), None)
    if found is None:
        return LONGEST, f"protocol.max_seq_len: {LONGEST:,}; config.json states no context length"
    length = min(LONGEST, int(found))
    return length, f"protocol.max_seq_len: {length:,}, of the {found:,} tokens that config.json states"
