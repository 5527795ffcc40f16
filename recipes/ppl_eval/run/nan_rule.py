"""What becomes of windows whose NLL is not finite: the config's ``nan`` and ``debug_nan``."""

import json
from dataclasses import asdict

import numpy as np
from torchtune.utils import get_logger

from ppl_eval.distributed.process import wait_for
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.models.first_bad_module import Watched
from ppl_eval.protocols.batches import Batch
from ppl_eval.run.state import RunState
from ppl_eval.scoring import finite


def apply(
    state: RunState, batch: Batch, scores: WindowScores, watched: Watched | None, *, quiet: bool
) -> WindowScores:
    """Return a batch's scores without the windows whose NLL is not finite, if the config says so.

    Args:
        state: the run.
        batch: the batch; it has such a window.
        scores: what it scored.
        watched: with ``debug_nan``, what hooks saw in the forward.
        quiet: say nothing: one line a process is enough, the result has all of them.

    Raises:
        ValueError: if ``nan`` is ``error``; names the window, its document and its place in it.
    """
    found = finite.describe(batch, scores, state.world.where)
    if watched is not None:
        found += f"; {_locate(state, batch, _first_of_peers(state, batch, watched))}"
    if state.settings.nan == "error":
        hint = "" if state.settings.debug_nan else "debug_nan=true names the module; "
        raise ValueError(
            f"{found}: the model gives no finite probability there. Try dtype=fp32, and look for NaN in the"
            f" checkpoint; {hint}nan=exclude leaves such windows out, and says so"
        )
    if not quiet or (watched is not None and state.dims.is_counted(state.world.rank)):
        log = get_logger(state.settings.log_level)
        log.warning(f"{found}: the window is left out (nan: exclude); the result names all that are")
    return finite.exclude(batch, scores)


def _first_of_peers(state: RunState, batch: Batch, watched: Watched) -> Watched:
    """Return what the peer saw that met the bad value first: each has a part of the sequence or of layers."""
    world, num_peers = state.world, state.dims.peers
    if num_peers == 1:
        return watched
    key = f"debug_nan/{int(batch.window_ids_B[0])}"
    world.store.set(f"{key}/{world.rank}", json.dumps(asdict(watched)))
    first = world.rank // num_peers * num_peers
    seen = []
    for peer in range(first, first + num_peers):
        wait_for(world, f"{key}/{peer}", f"rank {peer} to say where it met a NaN")
        seen.append(Watched(**json.loads(world.store.get(f"{key}/{peer}"))))
    return min(seen, key=lambda watched: (not watched.text, watched.num_done))


def _locate(state: RunState, batch: Batch, watched: Watched) -> str:
    """Say in words which module it was, in which window and at which token."""
    if not watched.text:
        return "debug_nan: every module's output is finite: it is lost in the head's matrix or the softmax"
    text = f"debug_nan: the first output that is not finite is that of {watched.text}"
    if watched.row is None or watched.column is None or watched.row >= len(batch.window_ids_B):
        return text
    windows = state.inputs.plan.locate(np.array([batch.window_ids_B[watched.row]]))
    position = int(windows.start[0]) + watched.column - int(windows.prefix[0])
    token = "the prefix token" if position < windows.start[0] else f"token {position} of its document"
    if position >= windows.stop[0]:
        token = "its padding"
    return f"{text}; first in window {batch.window_ids_B[watched.row]}, at {token}"
