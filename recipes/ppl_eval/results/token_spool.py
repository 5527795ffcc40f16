"""What every token scored, beside the ledger while the run goes on, until ``tokens.parquet`` is written.

    <output_dir>/ledger/<key>/tokens-<r>.bin   records, one a scored token, as rank r scored them

A record is 32 bytes, little endian: window_id, position (int64), nll, entropy (nats; float32), rank,
top_token (int32); with a reference 16 more: its nll, kl, reverse_kl (nats; float32), top_rank (int32). A
batch is one write, made before the ledger has its windows: what the ledger has is here.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.config.settings import Settings
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.metrics.window_records import Form, Records, targets_of
from ppl_eval.protocols.base import BoolArray, IntArray
from ppl_eval.protocols.batches import Batch
from ppl_eval.protocols.plan import Plan

_FIELDS = [("window_id", "<i8"), ("position", "<i8")]
_FIELDS += [("nll", "<f4"), ("entropy", "<f4"), ("rank", "<i4"), ("top_token", "<i4")]
COMPARED = ("reference_nll", "kl", "reverse_kl", "top_rank")
_COMPARED_FIELDS = list(zip(COMPARED, ("<f4", "<f4", "<f4", "<i4"), strict=True))
_CHUNK = 1 << 20


def token_form(compared: bool) -> Form:
    """Return the form of a token's record, by whether the run has a reference."""
    return np.dtype(_FIELDS + (_COMPARED_FIELDS if compared else []))


def keeps_tokens(settings: Settings) -> bool:
    """Return whether a run keeps what every token scored: for ``tokens.parquet``, or for percentiles of a
    comparison."""
    return settings.per_token or settings.reference is not None


class TokenSpool:
    """The tokens that one rank scores.

    Args:
        folder: the ledger's folder of the plan.
        rank: this rank.
        plan: the plan.
    """

    def __init__(self, folder: Path, rank: int, plan: Plan) -> None:
        self.path, self._plan = folder / f"tokens-{rank}.bin", plan

    def append(self, batch: Batch, scores: WindowScores) -> None:
        """Write the tokens of a batch through to the operating system.

        Raises:
            ValueError: if they cannot be written.
        """
        records = records_of(batch, scores, self._plan)
        try:
            with open(self.path, "ab", buffering=0) as file:
                # On the grid of whole records, behind what a run that died left.
                file.truncate(file.tell() // records.itemsize * records.itemsize)
                if file.write(records.tobytes()) < records.nbytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ValueError(
                f"the records of scored tokens cannot be written to {self.path}: {error.strerror}; make room,"
                " or leave per_token and reference out"
            ) from error


def records_of(batch: Batch, scores: WindowScores, plan: Plan) -> npt.NDArray[Any]:
    """Return the records of a scored batch, in the order of its windows and their positions."""
    compared = scores.comparison
    form = token_form(compared is not None)
    if not len(batch.window_ids_B):
        return np.zeros(0, dtype=form)
    assert scores.nll_BT is not None
    windows = plan.locate(batch.window_ids_B)
    window_N, column_N = np.nonzero(targets_of(batch, scores)[0])
    records = np.zeros(len(window_N), dtype=form)
    records["window_id"] = batch.window_ids_B[window_N]
    records["position"] = windows.start[window_N] + column_N + 1 - windows.prefix[window_N]
    records["nll"] = scores.nll_BT[window_N, column_N]
    if scores.details_N:
        records["rank"], records["top_token"], records["entropy"] = scores.details_N
    for name, values_N in zip(COMPARED, compared or (), strict=False):
        records[name] = values_N
    return records


def tokens_of(settings: Settings, ledgers: Sequence[Path], own: Records, rank: int) -> "SpooledTokens":
    """Find the tokens of the windows that this rank answers for.

    Args:
        settings: of the run.
        ledgers: the ledgers' folders of this host.
        own: the windows, ordered.
        rank: this rank.

    Raises:
        ValueError: if some are missing.
    """
    found = SpooledTokens(ledgers, own, token_form(settings.reference is not None), rank)
    if found.missing_W.any():
        raise ValueError(
            f"{', '.join(map(str, ledgers))}: {int(found.missing_W.sum())} windows are recorded without their"
            " tokens; run again, which scores them anew"
        )
    return found


class SpooledTokens:
    """Finds the tokens of windows in the spools of this host.

    Args:
        folders: the ledgers' folders of the plan: one, or one a part.
        own: the windows that this rank answers for, ordered (``Ledger.own``).
        form: of a token's record.
        rank: this rank, whose own spool is looked through first.
    """

    def __init__(self, folders: Sequence[Path], own: Records, form: Form, rank: int = 0) -> None:
        self.form = form
        self.window_W: IntArray = own["window_id"]
        self.num_tokens_W: IntArray = own["num_tokens"]
        self._nll_sum_W = own["nll_sum"]
        self._files: list[npt.NDArray[Any]] = []
        self._file_W = np.full(len(own), -1)
        self._start_W = np.zeros(len(own), dtype=np.int64)
        mine = f"tokens-{rank}.bin"
        paths = [path for folder in folders for path in sorted(folder.glob("tokens-*.bin"))]
        for path in sorted(paths, key=lambda path: path.name != mine):
            if not self.missing_W.any():
                return
            if os.path.getsize(path) >= form.itemsize:
                self._look_through(path)

    @property
    def missing_W(self) -> BoolArray:
        """Whether the tokens of each window are nowhere here."""
        return (self._file_W < 0) & (self.num_tokens_W > 0)

    def _look_through(self, path: Path) -> None:
        num_records = os.path.getsize(path) // self.form.itemsize
        records = np.memmap(path, dtype=self.form, mode="r", shape=(num_records,))
        cuts = [np.zeros(1, dtype=np.int64)]
        for begin in range(0, len(records) - 1, _CHUNK):
            part = records[begin : begin + _CHUNK + 1]
            # A window that was cut off and scored again by a later run begins anew.
            new = np.diff(part["window_id"]) != 0
            new |= np.diff(part["position"]) <= 0
            cuts.append(begin + 1 + np.flatnonzero(new))
        start_K = np.concatenate(cuts)
        count_K = np.diff(start_K, append=len(records))
        window_K = records["window_id"][start_K]
        place_K = np.minimum(np.searchsorted(self.window_W, window_K), len(self.window_W) - 1)
        whole_K = (self.window_W[place_K] == window_K) & (self.num_tokens_W[place_K] == count_K)
        # The ledger's records have check numbers; a token that a disk changed shows in its window's sum.
        nll_sum_K = np.add.reduceat(records["nll"], start_K, dtype=np.float64)
        whole_K &= np.isclose(nll_sum_K, self._nll_sum_W[place_K], rtol=1e-9, atol=1e-9)
        self._file_W[place_K[whole_K]] = len(self._files)
        self._start_W[place_K[whole_K]] = start_K[whole_K]
        self._files.append(records)

    def read(self, index: int) -> npt.NDArray[Any]:
        """Return the records of the window with this index among this rank's own."""
        start, num_tokens = int(self._start_W[index]), int(self.num_tokens_W[index])
        if not num_tokens:
            return np.zeros(0, dtype=self.form)
        return np.asarray(self._files[self._file_W[index]][start : start + num_tokens])
