"""Where this project keeps files on a machine."""

import os
from pathlib import Path


def home() -> Path:
    """Return the cache folder: ``PPL_EVAL_HOME``, else ``~/.cache/ppl_eval``."""
    return Path(os.environ.get("PPL_EVAL_HOME") or Path.home() / ".cache" / "ppl_eval").expanduser()
