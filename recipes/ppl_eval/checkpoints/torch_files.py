"""Files that ``torch.save`` wrote: read with nothing executed, memory-mapped, and released while they are
converted."""

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoints.quantized_tensors import is_quantized
from ppl_eval.checkpoints.safetensors import StoredTensor, check_readable

# A file is mapped anew after this many bytes were handed out, so that the pages of converted weights do not
# pile up.
REMAP_BYTES = 16 * 1024 * 1024
MAX_REMAPS = 64
REFUSED_NAME = re.compile(r"nsupported (?:global: )?GLOBAL (\S+)")


def read_torch_file(path: Path, *, allow_unsafe_pickle: bool, notes: list[str]) -> Any:
    """Read a ``.pt``, ``.pth`` or ``.bin`` file, its tensors memory-mapped where its format allows it.

    Args:
        path: the file.
        allow_unsafe_pickle: True executes whatever the file's pickle asks for, when the safe way fails.
        notes: what the person should know is appended here.

    Raises:
        ValueError: for a truncated or corrupt file, or one that needs more than tensors and plain values.
    """
    size = check_readable(path)
    if not zipfile.is_zipfile(path):
        _check_not_truncated(path, size)
        notes.append(f"{path.name} is in torch's old format, which cannot be mapped: every rank holds a copy")
    try:
        return _load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as e:
        refused = REFUSED_NAME.search(str(e))
        if refused is None:
            lines = [line.strip() for line in str(e).splitlines() if line.strip()]
            said = next(
                (line for line in lines if line.startswith("Unsupported operand")),
                lines[0][:300] if lines else "",
            )
            raise ValueError(
                f"{path} ({size} bytes) is corrupt or no torch checkpoint: {said or type(e).__name__}"
            ) from e
        if not allow_unsafe_pickle:
            raise ValueError(
                f"{path} holds more than tensors: it asks for {refused[1]}. Loading it would run code that"
                " the file chooses, with your rights. Convert it to safetensors; or, if you trust whoever"
                " wrote it, set checkpointer.allow_unsafe_pickle=true"
            ) from e
    notes.append(f"{path.name} was unpickled without restrictions (allow_unsafe_pickle): its code ran")
    return _load(path, weights_only=False)


def index_torch_file(path: Path, *, allow_unsafe_pickle: bool, notes: list[str]) -> dict[str, StoredTensor]:
    """Index the weights in a torch file by name; of a whole training state, those under ``model``.

    Raises:
        ValueError: as ``read_torch_file``, and if the file holds something else than named tensors.
    """
    content = read_torch_file(path, allow_unsafe_pickle=allow_unsafe_pickle, notes=notes)
    nested = isinstance(content, Mapping) and isinstance(content.get("model"), Mapping)
    named = content["model"] if nested else content
    if not isinstance(named, Mapping):
        raise ValueError(f"{path} holds a {type(named).__name__}, not a mapping of names to tensors")
    others = [str(name) for name, value in named.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"{path} holds {len(others)} entries that are no tensors, first {others[0]}: no weights of a"
            " model"
        )
    reopen = None
    if zipfile.is_zipfile(path):
        # The notes of the first reading are enough.
        reopen = partial(read_torch_file, path, allow_unsafe_pickle=allow_unsafe_pickle, notes=[])
    read = _remapping_reader(named, nested, path.stat().st_size, reopen)
    return {
        str(name): StoredTensor(t if is_quantized(t) else t.to("meta"), partial(read, name))
        for name, t in named.items()
    }


def _load(path: Path, *, weights_only: bool) -> Any:
    import torchao.dtypes  # noqa: F401 (its tensor classes register themselves as safe to load)

    return torch.load(str(path), map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)


def _remapping_reader(
    content: Mapping[str, torch.Tensor], nested: bool, size: int, reopen: Callable[[], Any] | None
) -> Callable[[str], torch.Tensor]:
    """Return a function from name to tensor that holds the file's mapping only for a while.

    torch maps a file as a whole: pages that were read for a conversion stay resident as long as anything
    holds the mapping. Weights that are used as they are keep theirs alive; the rest goes with this reader's.
    """
    step = max(REMAP_BYTES, size // MAX_REMAPS)
    mapped: Mapping[str, torch.Tensor] = content
    bytes_left = step

    def read(name: str) -> torch.Tensor:
        nonlocal mapped, bytes_left
        if bytes_left <= 0 and reopen is not None:
            again = reopen()
            mapped, bytes_left = again["model"] if nested else again, step
        tensor = mapped[name]
        bytes_left -= tensor.numel() * tensor.element_size()
        return tensor

    return read


def _check_not_truncated(path: Path, size: int) -> None:
    """Refuse a file that begins like a zip archive, as torch's files do, and does not end like one.

    Raises:
        ValueError: if it does.
    """
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ValueError(
                f"{path} is truncated after {size} bytes: the directory that a torch file ends with is "
                "missing; download or copy it again"
            )
