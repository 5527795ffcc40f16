"""Files that a checkpoint names stay inside its folder, links included."""

import re
from pathlib import Path, PurePosixPath, PureWindowsPath

# huggingface_hub's cache: models--<owner>--<name>/snapshots/<revision>/<file> -> ../../blobs/<hash>.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def inside_folder(folder: Path, name: str, named_by: str) -> Path:
    """Return the path of a file in a folder.

    Args:
        folder: of the checkpoint.
        name: the file's, as ``named_by`` has it.
        named_by: the config key or file it came from, for messages.

    Raises:
        ValueError: if the name leads out of the folder, by itself or through a link. Links of the Hugging
            Face cache, from a snapshot to the blobs beside it, are followed.
    """
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in parts:
        raise ValueError(
            f"{named_by} names the file {name!r}, which is not inside the checkpoint's folder {folder}; names"
            " must be relative, without '..'"
        )
    path = folder / name
    target, root = path.resolve(), folder.resolve()
    if not target.is_relative_to(root) and not _is_blob_of(target, root):
        raise ValueError(
            f"{path} is a link to {target}, outside the checkpoint's folder; put the file itself there, or"
            f" set checkpointer.checkpoint_dir to {target.parent}"
        )
    return path


def _is_blob_of(target: Path, root: Path) -> bool:
    """Return whether a target is a blob of the Hugging Face cache, of the model whose snapshot this is."""
    for snapshots in root.parents:
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return target.parent == snapshots.parent / "blobs" and bool(_BLOB.fullmatch(target.name))
    return False
