"""Where a run goes on that an earlier one of the same evaluation began.

The first rank of every node reads the ledger of its host. Hosts need not share a folder: each brings what it
has, and one reduction over the ranks decides who answers for which window. A batch is done when all its
windows are recorded; the others are scored again, whole, so that every batch has the shape that it has in an
undisturbed run.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ppl_eval.distributed.rendezvous import World
from ppl_eval.protocols.base import BoolArray
from ppl_eval.results.baseline import leaves
from ppl_eval.results.ledger import FOLDER, PLAN_FILE, Ledger, has_records, plan_key, read_ledger
from ppl_eval.results.token_spool import SpooledTokens, keeps_tokens, token_form
from ppl_eval.run.state import RunState

_WINDOWS_AT_ONCE = 1 << 20
_SHOWN = 8


def check(output_dir: Path, facts: Mapping[str, Any], resume: str) -> str | None:
    """See what unfinished runs the output_dir of this host holds, before this run's ledger is opened.

    Args:
        output_dir: of the run.
        facts: its plan's.
        resume: ``auto`` goes on with the same evaluation and refuses to leave another one's unfinished work
            behind; ``never`` keeps what is there aside and starts over; ``require`` is ``auto`` (there must
            be something to go on from on some host: ``require``).

    Returns:
        A line that says what was kept aside; None if nothing was.

    Raises:
        ValueError: for unfinished work of another evaluation under ``auto`` and ``require``.
    """
    folders = [path for path in sorted((output_dir / FOLDER).glob("*")) if has_records(path)]
    if resume == "never":
        return _keep_aside(output_dir, folders)
    key = plan_key(facts)
    others = [folder for folder in folders if folder.name != key]
    if others:
        found = read_facts(others[0])
        raise ValueError(
            f"output_dir {output_dir} holds an unfinished run of another evaluation: its key is"
            f" {others[0].name}, this run's is {key}. What differs:\n{describe_differences(facts, found)}\n"
            "Go on with that one by its own settings, use resume=never to start over (its records are kept"
            " aside), or give this run another output_dir"
        )
    return None


def _keep_aside(output_dir: Path, folders: list[Path]) -> str | None:
    for folder in folders:
        aside = (
            output_dir / "previous" / folder.name / f"ledger-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        )
        aside.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # Another host that shares the folder was faster.
            folder.rename(aside)
    if not folders:
        return None
    keys = ", ".join(folder.name for folder in folders)
    return f"resume=never: records of unfinished runs ({keys}) were kept aside in {output_dir / 'previous'}"


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts of a plan's folder; none where they cannot be read."""
    try:
        found = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return a line for each of the first facts that differ, nested ones by dotted name; "" for none."""
    here, there = leaves(json.loads(json.dumps(ours)), ""), leaves(theirs, "")
    lines = [
        f"  {name.lstrip('.')}: {here.get(name, 'absent')} here, {there.get(name, 'absent')} there"
        for name in sorted({*here, *there})
        if here.get(name, "absent") != there.get(name, "absent")
    ]
    more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(lines[:_SHOWN] + more)


def take_over(ledger: Ledger, state: RunState, world: World) -> BoolArray:
    """Find the batches that earlier runs finished, and share out their records; all ranks must call it.

    Args:
        ledger: of this rank, before its first record; its ``resumed`` is set.
        state: the run.
        world: its processes.

    Returns:
        Whether each batch is done; bool [num_batches].
    """
    plan, device = state.inputs.plan, state.device
    records = ledger.resumed
    if world.local_rank == 0:
        records = read_ledger(ledger.folder, ledger.form)
        if state.settings.nan == "error":
            # A record has the same bits under both rules, so the key does not know which one was in force.
            records = records[records["num_excluded"] == 0]
        if keeps_tokens(state.settings):
            form = token_form(state.settings.reference is not None)
            records = records[~SpooledTokens([ledger.folder], records, form).missing_W]
    # As batches take them.
    places = plan.places(records["window_id"])
    order = np.argsort(places)
    order = order[slice(*np.searchsorted(places, state.share.places, sorter=order))]
    records, places = records[order], places[order]
    done = np.zeros(plan.num_batches, dtype=np.bool_)
    mine = []
    # Whole batches at a time.
    step = max(1, _WINDOWS_AT_ONCE // plan.batch_size)
    for first in range(0, plan.num_batches, step):
        last = min(first + step, plan.num_batches)
        bounds = [first * plan.batch_size, min(last * plan.batch_size, plan.num_windows)]
        span = slice(*np.searchsorted(places, bounds))
        here, place = records[span], places[span] - bounds[0]
        owners = np.full(bounds[1] - bounds[0], world.world_size, dtype=np.int32)
        owners[place] = world.rank
        owners = _minimum(owners, device)
        starts = np.arange(0, len(owners), plan.batch_size)
        done[first:last] = np.maximum.reduceat(owners, starts) < world.world_size
        whole = done[first:last][place // plan.batch_size]
        mine.append(here[whole & (owners[place] == world.rank)])
    ledger.resumed = np.concatenate([records[:0], *mine])
    return done


def _minimum(values: Any, device: torch.device) -> Any:
    tensor = torch.from_numpy(values).to(device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor.cpu().numpy()


def require(resume: str, done: BoolArray, output_dir: Path) -> None:
    """Refuse to start over where ``resume`` is ``require``.

    Raises:
        ValueError: if no batch is done.
    """
    if resume == "require" and not done.any():
        raise ValueError(
            f"resume is 'require', and there is nothing to go on from: no finished batch of this evaluation"
            f" in {output_dir / FOLDER}; use resume=auto to start from the beginning"
        )
