"""Files of two evaluations never stand side by side in one ``output_dir``: the older ones are moved aside.

<output_dir>/previous/<key>/    result, report and Parquet files of the evaluation with that key
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

FOLDER = "previous"
RESULT = "result.json"
REPORT = "report.html"


def set_aside(output_dir: Path, key: str, baseline: str | None) -> str | None:
    """Move the files of another evaluation out of the way of this one's.

    Files of the same evaluation stay: they are replaced by the same content.

    Args:
        output_dir: of the run that is about to start.
        key: its key (``ledger.plan_key``).
        baseline: path of the result that the run is compared with, if there is one.

    Returns:
        A line that says what was moved; None if nothing was.

    Raises:
        ValueError: if ``baseline`` is among the files to be moved.
    """
    results = [path for path in (output_dir / "part.json", output_dir / RESULT) if path.is_file()]
    files = sorted(output_dir.glob("*.parquet")) + results
    theirs = _key_of(results[-1]) if results else None
    # Without a result, tables of an unfinished run; its ledger says whose.
    if not files or theirs == key or (theirs is None and (output_dir / "ledger" / key).is_dir()):
        return None
    if baseline is not None and Path(baseline).expanduser().resolve().parent == output_dir.resolve():
        raise ValueError(
            f"baseline {baseline} is the result of another evaluation in this run's own output_dir, where the"
            " new one would replace it: give this run another output_dir"
        )
    written = time.strftime("%Y%m%d-%H%M%S", time.gmtime(files[-1].stat().st_mtime))
    folder = output_dir / FOLDER / (theirs or written)
    folder.mkdir(parents=True, exist_ok=True)
    # The result last: should this be cut short, the next run goes on with it.
    reports = [path for path in (output_dir / REPORT,) if path.is_file()]
    for path in reports + files:
        if path.is_dir():  # A table in parts.
            shutil.rmtree(folder / path.name, ignore_errors=True)
        os.replace(path, folder / path.name)
    return f"{output_dir} held the files of another evaluation: moved to {folder}"


def _key_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("key")
    except (OSError, ValueError, AttributeError):
        return None
