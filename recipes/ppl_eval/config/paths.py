"""Where this project keeps files on a machine."""

import os
import stat
from pathlib import Path


def home() -> Path:
    """Return the cache folder: ``PPL_EVAL_HOME``, else ``~/.cache/ppl_eval``.

    Raises:
        ValueError: if others can change what is in it: tokens and models in it are taken for what they say.
    """
    path = Path(os.environ.get("PPL_EVAL_HOME") or Path.home() / ".cache" / "ppl_eval").expanduser()
    try:
        found = path.stat()
    except OSError:
        return path  # Made when something is put there.
    way_out = "set PPL_EVAL_HOME to a folder of your own"
    if found.st_uid not in (os.getuid(), 0):
        raise ValueError(
            f"the cache folder {path} belongs to user {found.st_uid}, who can change it; {way_out}"
        )
    if found.st_mode & stat.S_IWOTH:
        raise ValueError(
            f"everybody can write to the cache folder {path}; `chmod o-w {path}` mends that, or {way_out}"
        )
    return path
