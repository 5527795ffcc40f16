"""What a reader needs to repeat a run: when, where, by which command, with which files and kernels."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ppl_eval.distributed.rendezvous import World
from ppl_eval.run.state import RunState

_ROOT = Path(__file__).resolve().parents[3]


def run_facts(state: RunState) -> dict[str, Any]:
    """Return the ``run`` section of the result; JSON values, as rank 0 knows them."""
    given, tokenizer = state.settings.as_dict(), state.inputs.encoder
    section = given["tokenizer"]
    return {
        "start": state.started.isoformat(timespec="seconds"),
        "end": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "hosts": [{"host": node.host, "ranks": node.ranks} for node in state.world.nodes],
        "git_commit": git_commit(_ROOT),
        "checkpoint": _paths(given["checkpointer"]),
        "tokenizer": {
            "component": section["_component_"],
            "paths": _paths(section),
            "sha256": tokenizer.sha256,
        },
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_CBWR")},
        "kernels": {**state.model.scorer.model.kernels(), "concurrent_batches": state.concurrent_batches},
    }


def merged_facts(world: World, started: datetime, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``run`` section of a result that was joined from parts: where and by which command they were
    joined, and under ``parts`` the same of each part's own run."""
    return {
        "start": started.isoformat(timespec="seconds"),
        "end": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "working_directory": os.getcwd(),
        "hosts": [{"host": node.host, "ranks": node.ranks} for node in world.nodes],
        "git_commit": git_commit(_ROOT),
        "parts": [{"part": part["part"], **part["run"]} for part in parts],
    }


def git_commit(root: Path) -> str | None:
    """Return the commit of this package's checkout, with ``-dirty`` where tracked files were changed; None
    for an installed package or without git."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _paths(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of a section that name files or folders, absolute."""
    return {
        key: str(Path(value).expanduser().absolute())
        for key, value in section.items()
        if isinstance(value, str) and not key.startswith("_") and Path(value).expanduser().exists()
    }
