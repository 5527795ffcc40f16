"""Run the recipe as a person does, in processes of its own, and read what it wrote."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
TUNE = str(BIN / "tune")
TORCHRUN = str(BIN / "torchrun")
PPL_EVAL = str(BIN / "ppl-eval")


@dataclass
class Finished:
    """A process that ended: its exit code, and stdout and stderr together."""

    code: int
    output: str


def run(
    *command: str, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 300
) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        command,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Finished(done.returncode, done.stdout)


def result_of(output_dir: Path) -> dict[str, Any]:
    """The result file of a run."""
    return json.loads((output_dir / "result.json").read_text())


def many(
    num_processes: int, argvs: list[list[str]], scratch: Path, env: dict[str, str] | None = None
) -> Finished:
    """Run the recipe once for every argument list, all in one launch of ``num_processes`` ranks: imports are
    slow, runs are not."""
    jobs = scratch / f"jobs{num_processes}.json"
    jobs.write_text(json.dumps(argvs))
    script = str(Path(__file__).with_name("many_runs.py"))
    return run(TORCHRUN, "--standalone", "--nproc_per_node", str(num_processes), script, str(jobs), env=env)
