"""Checkpoints named by their id on a model hub: ``org/name`` or ``org/name@revision``.

``huggingface_hub`` downloads them into its cache, where HF_HOME is, and finds them there under
HF_HUB_OFFLINE. One request decides whether there is a hub; nothing is tried again.
"""

import re
from pathlib import Path
from typing import Any

_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_SECONDS = 10.0
# What scoring reads: descriptions, tokenizers and weights.
_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.model", "pytorch_model*.bin")
# Weights a second time: Meta's own files, other forms.
_NOT = ("original/*", "consolidated*", "onnx/*", "*/*.bin")


def parse(value: str) -> tuple[str, str | None] | None:
    """Split an id on a hub into name and revision; None for a folder, or what cannot be an id."""
    match = _ID.fullmatch(value)
    if match is None or Path(value).expanduser().exists() or value.startswith("."):
        return None
    return match[1], match[2]


def download(name: str, revision: str | None) -> str:
    """Return the folder of a model of a hub, downloaded where the cache does not have it.

    Args:
        name: ``org/name``.
        revision: branch, tag or commit; None for the main branch.

    Raises:
        ValueError: if the hub cannot be reached and the cache does not have it, or the hub has no such model
            or does not give it.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = f"{name}@{revision}" if revision else name
    why = "HF_HUB_OFFLINE is set"
    commit = revision
    online = not constants.HF_HUB_OFFLINE
    if online:
        try:
            commit = HfApi().repo_info(name, revision=revision, timeout=_SECONDS).sha
        except HfHubHTTPError as error:
            raise ValueError(f"checkpoint {wanted}: {str(error).strip().splitlines()[-1]}") from error
        except Exception as error:  # no hub: what the client's library raises differs between releases
            online, why = False, f"{constants.ENDPOINT} cannot be reached ({error})"
    try:
        return snapshot_download(
            name,
            revision=commit,
            local_files_only=not online,
            allow_patterns=list(_FILES),
            ignore_patterns=list(_NOT),
        )
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"checkpoint {wanted} is neither a folder here nor in the cache {constants.HF_HUB_CACHE}, and"
            f" {why}. Download it where there is a network (`hf download {name}`), and copy the folder or the"
            " cache here (HF_HOME)"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"checkpoint {wanted}: {str(error).strip().splitlines()[-1]}") from error


def snapshot_of(folder: str) -> dict[str, Any] | None:
    """Return id and commit of a folder inside the cache of a hub; None for any other folder."""
    parts = Path(folder).expanduser().absolute().parts
    for model, snapshots, commit in zip(parts, parts[1:], parts[2:], strict=False):
        if model.startswith("models--") and snapshots == "snapshots":
            return {"id": model.removeprefix("models--").replace("--", "/", 1), "commit": commit}
    return None
