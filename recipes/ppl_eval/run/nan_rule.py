"""What becomes of windows whose NLL is not finite: the config's ``nan``."""

from torchtune.utils import get_logger

from ppl_eval.metrics.totals import WindowScores
from ppl_eval.protocols.batches import Batch
from ppl_eval.run.state import RunState
from ppl_eval.scoring import finite


def apply(state: RunState, batch: Batch, scores: WindowScores, *, quiet: bool) -> WindowScores:
    """Return a batch's scores without the windows whose NLL is not finite, if the config says so.

    Args:
        state: the run.
        batch: the batch; it has such a window.
        scores: what it scored.
        quiet: say nothing: one line a process is enough, the result has all of them.

    Raises:
        ValueError: if ``nan`` is ``error``; names the window, its document and its place in it.
    """
    found = finite.describe(batch, scores, state.world.where)
    if state.settings.nan == "error":
        raise ValueError(
            f"{found}: the model gives no finite probability there. Try dtype=fp32, and look for NaN in the"
            " checkpoint; nan=exclude leaves such windows out, and says so"
        )
    if not quiet:
        log = get_logger(state.settings.log_level)
        log.warning(f"{found}: the window is left out (nan: exclude); the result names all that are")
    return finite.exclude(batch, scores)
