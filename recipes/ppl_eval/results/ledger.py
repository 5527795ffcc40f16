"""What was scored, on disk while the run goes on, so that a run that dies does not take its work along.

    <output_dir>/ledger/<key>/plan.json      all that the bits of a record depend on; its hash is the key
    <output_dir>/ledger/<key>/rank-<r>.bin   records, one a window, as rank r scored them

A record is 48 bytes, little endian: window_id, num_tokens, num_correct (int64), nll_sum (nats), nll_sq_sum
(nats^2; float64), and a check number over the five. Every batch is one write, without fsync: a process that
is killed loses nothing, a machine that loses power the last seconds. What a crash tears is recognised by its
length or its check number, and left out.

Each host needs an output_dir that it can write; it need not be shared. When the result is written, the folder
goes.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from ppl_eval.config.files import write_json
from ppl_eval.metrics.totals import WindowScores
from ppl_eval.protocols import coverage
from ppl_eval.protocols.batches import Batch

_COUNTS, _SUMS = ("window_id", "num_tokens", "num_correct"), ("nll_sum", "nll_sq_sum")
RECORD = np.dtype(
    [(name, "<i8") for name in _COUNTS] + [(name, "<f8") for name in _SUMS] + [("check", "<u8")]
)
_PLAN_FILE = "plan.json"

Records = npt.NDArray[np.void]


def records_of(batch: Batch, scores: WindowScores) -> Records:
    """Return the records of a scored batch."""
    records = np.zeros(len(batch.window_ids_B), dtype=RECORD)
    records["window_id"] = batch.window_ids_B
    records["num_tokens"], records["num_correct"] = scores.num_tokens_B, scores.num_correct_B
    records["nll_sum"], records["nll_sq_sum"] = scores.nll_sum_B, scores.nll_sq_sum_B
    records["check"] = _check_numbers(records)
    return records


class Ledger:
    """The records of one rank.

    Args:
        folder: folder of the plan.
        rank: this rank; its file is made with the first record.
        lock: what keeps other runs out of the output_dir, if this rank holds it.
    """

    def __init__(self, folder: Path, rank: int, lock: FileLock | None = None) -> None:
        self.folder, self.path = folder, folder / f"rank-{rank}.bin"
        self._lock = lock
        self._file: IO[bytes] | None = None
        self._begin = 0

    def append(self, records: Records) -> None:
        """Write the records of a batch through to the operating system."""
        if not len(records):
            return
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
                # Behind what an earlier run of this plan left, on the grid of whole records.
                self._begin = self._file.tell() // RECORD.itemsize * RECORD.itemsize
                self._file.truncate(self._begin)
            if self._file.write(records.tobytes()) < records.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ValueError(
                f"the records of finished windows cannot be written to {self.path}: {error.strerror}; what"
                " stands there already is kept"
            ) from error

    def own(self) -> Records:
        """Return what this rank scored in this run, ordered by window."""
        if self._file is None:
            return np.zeros(0, dtype=RECORD)
        return np.sort(_read_file(self.path, self._begin), order="window_id")

    def close(self) -> None:
        """Close the file and let other runs in; a folder without records is removed."""
        if self._lock is not None:
            self._lock.release()
        if self._file is not None:
            self._file.close()
            return
        with suppress(OSError):  # The rank that wrote the result may be removing it right now.
            if not list(self.folder.glob("rank-*.bin")):
                self.remove()

    def remove(self) -> None:
        """Remove the plan's folder with the records of all ranks of this host: the result holds them now."""
        shutil.rmtree(self.folder, ignore_errors=True)
        # Other plans may have their records there, or another rank be faster.
        with suppress(OSError):
            self.folder.parent.rmdir()


def open_ledger(output_dir: Path, facts: Mapping[str, Any], rank: int) -> Ledger:
    """Open the ledger of a rank, in the folder of its plan; the folder is made and described.

    Args:
        output_dir: the run's.
        facts: what the bits of a record depend on (``run.facts.plan_facts``).
        rank: this rank.

    Raises:
        ValueError: if the folder cannot be written, or another run is writing there.
    """
    folder = output_dir / "ledger" / plan_key(facts)
    lock = _only_run(output_dir) if rank == 0 else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / _PLAN_FILE).exists():
            write_json(folder / _PLAN_FILE, facts)
    except OSError as error:
        raise ValueError(
            f"the records of finished windows cannot be kept in {folder}: {error.strerror}; every host needs"
            " an output_dir that it can write"
        ) from error
    return Ledger(folder, rank, lock)


def _only_run(output_dir: Path) -> FileLock | None:
    lock = FileLock(output_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another run is writing to output_dir {output_dir}: wait for its end, or give this one another"
        ) from error
    except (OSError, NotImplementedError):
        return None  # A file system without locks.
    return lock


def plan_key(facts: Mapping[str, Any]) -> str:
    """Return the short name of a plan: equal facts, equal name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_ledger(folder: Path) -> Records:
    """Read all whole records of a plan's folder, one a window, ordered by window.

    A window that was scored more than once (by runs that died) was scored with the same bits.

    Args:
        folder: ``<output_dir>/ledger/<key>`` of one host.
    """
    parts = [_read_file(path) for path in sorted(folder.glob("rank-*.bin"))]
    records = np.concatenate([np.zeros(0, dtype=RECORD), *parts])
    _, first = np.unique(records["window_id"], return_index=True)
    return records[first]


def _read_file(path: Path, begin: int = 0) -> Records:
    num_records = max(0, os.path.getsize(path) - begin) // RECORD.itemsize
    records = np.fromfile(path, dtype=RECORD, count=num_records, offset=begin)
    return records[records["check"] == _check_numbers(records)]


def _check_numbers(records: Records) -> npt.NDArray[np.uint64]:
    # Not zero for a record of zeros, which is what a file system may leave of a write it never made.
    check = np.full(len(records), 1, dtype=np.uint64)
    for name in (*_COUNTS, *_SUMS):
        check = coverage.mix64(check + records[name].view(np.uint64))
    return check
