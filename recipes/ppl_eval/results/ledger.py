"""What was scored, on disk while the run goes on, so that a later run goes on from it.

    <output_dir>/ledger/<key>/plan.json      all that the bits of a record depend on; its hash is the key
    <output_dir>/ledger/<key>/rank-<r>.bin   records (``metrics.window_records``), as rank r scored them

Every batch is one write. The file is synchronised so often that a machine that loses power loses
``SYNC_SECONDS`` of work at most; a process that is killed loses none. What a crash tears is recognised by its
length or its check number, and left out.

Each host needs an output_dir that it can write; it need not be shared. When the result is written, the folder
goes.
"""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from ppl_eval.config.files import write_json
from ppl_eval.metrics.window_records import PLAIN, Form, Records, in_order, no_records, whole_records

SYNC_SECONDS = 10.0
FOLDER = "ledger"
PLAN_FILE = "plan.json"


class Ledger:
    """The records of one rank.

    Args:
        folder: folder of the plan.
        rank: this rank; its file is made with the first record.
        form: of a record (``window_records.form_of``).

    Attributes:
        resumed: what this rank answers for of the windows that earlier runs scored.
    """

    def __init__(self, folder: Path, rank: int, form: Form = PLAIN) -> None:
        self.folder, self.path = folder, folder / f"rank-{rank}.bin"
        self.form = form
        self.resumed = no_records(form)
        self._file: IO[bytes] | None = None
        self._begin = 0
        self._synced = self._written = time.monotonic()

    def append(self, records: Records) -> None:
        """Write the records of a batch through to the operating system."""
        if not len(records):
            return
        try:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
                # Behind what an earlier run of this plan left, on the grid of whole records.
                self._begin = self._file.tell() // records.itemsize * records.itemsize
                self._file.truncate(self._begin)
            if os.fstat(self._file.fileno()).st_nlink == 0:
                # What goes on being written there would be lost with the process.
                raise FileNotFoundError(errno.ENOENT, "it was removed while the run was writing it")
            if self._file.write(records.tobytes()) < records.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._synchronise()
        except OSError as error:
            raise ValueError(
                f"the records of finished windows cannot be written to {self.path}: {error.strerror}; what"
                " stands there already is kept"
            ) from error

    def _synchronise(self) -> None:
        # The next batch may take as long as this one, and comes too late if the time is over before.
        now = time.monotonic()
        due = now - self._synced + (now - self._written) >= SYNC_SECONDS
        self._written = now
        if due and self._file is not None:
            os.fdatasync(self._file.fileno())
            self._synced = time.monotonic()

    def own(self) -> Records:
        """Return what this rank scored in this run or answers for, ordered by window."""
        scored = self.resumed[:0]
        if self._file is not None:
            scored = _read_file(self.path, self.form, self._begin)
        return in_order(np.concatenate([self.resumed, scored]))

    def close(self) -> None:
        """Close the file, with all records on the disk; a folder without records is removed."""
        if self._file is not None:
            if not self._file.closed:
                with suppress(OSError):
                    os.fdatasync(self._file.fileno())
            self._file.close()
            return
        with suppress(OSError):  # The rank that wrote the result may be removing it right now.
            if not has_records(self.folder):
                self.remove()

    def remove(self) -> None:
        """Remove the plan's folder with the records of all ranks of this host: the result holds them now."""
        shutil.rmtree(self.folder, ignore_errors=True)
        # Other plans may have their records there, or another rank be faster.
        with suppress(OSError):
            self.folder.parent.rmdir()


def open_ledger(output_dir: Path, facts: Mapping[str, Any], rank: int, form: Form = PLAIN) -> Ledger:
    """Open the ledger of a rank, in the folder of its plan; the folder is made and described.

    Args:
        output_dir: the run's.
        facts: what the bits of a record depend on (``run.facts.plan_facts``).
        rank: this rank.
        form: of a record.

    Raises:
        ValueError: if the folder cannot be written, or the disk is too full for the records.
    """
    folder = output_dir / FOLDER / plan_key(facts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, facts.get("num_windows", 0), form)
        if not (folder / PLAN_FILE).exists():
            write_json(folder / PLAN_FILE, facts)
    except OSError as error:
        raise ValueError(
            f"the records of finished windows cannot be kept in {folder}: {error.strerror}; every host needs"
            " an output_dir that it can write"
        ) from error
    return Ledger(folder, rank, form)


def _check_room(folder: Path, num_windows: int, form: Form) -> None:
    needed, free = num_windows * form.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder} has {free / 2**20:,.1f} MiB of free space, but the records of {num_windows:,} windows"
            f" take up to {needed / 2**20:,.1f} MiB; make room, or choose another output_dir"
        )


def lock_output_dir(output_dir: Path) -> FileLock:
    """Keep other runs out of an output_dir until the lock is released or this process ends.

    Raises:
        ValueError: if another run is writing there.
    """
    lock = FileLock(output_dir / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another run is writing to output_dir {output_dir}: wait for its end, or give this one another"
        ) from error
    except (OSError, NotImplementedError):
        pass  # A file system without locks.
    return lock


def plan_key(facts: Mapping[str, Any]) -> str:
    """Return the short name of a plan: equal facts, equal name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def has_records(folder: Path) -> bool:
    """Return whether a plan's folder holds the records of some rank."""
    return any(path.stat().st_size > 0 for path in folder.glob("rank-*.bin"))


def read_ledger(folder: Path, form: Form = PLAIN) -> Records:
    """Read all whole records of a plan's folder, one a window, ordered by window.

    Args:
        folder: ``<output_dir>/ledger/<key>`` of one host.
        form: of a record of its run.
    """
    parts = [_read_file(path, form) for path in sorted(folder.glob("rank-*.bin"))]
    return in_order(np.concatenate([no_records(form), *parts]))


class RankFile(NamedTuple):
    """The records of one rank, for whoever looks at a ledger from outside.

    Attributes:
        path: the file.
        records: the whole ones, as they were written.
        num_damaged: records whose check number does not fit.
        torn_bytes: what stands behind the last record and is less than one.
    """

    path: Path
    records: Records
    num_damaged: int
    torn_bytes: int


def rank_files(folder: Path, form: Form = PLAIN) -> list[RankFile]:
    """Read the files of a plan's folder one by one, with what is wrong in them.

    Args:
        folder: ``<output_dir>/ledger/<key>`` of one host.
        form: of a record of its run.
    """
    size, files = form.itemsize, []
    for path in sorted(folder.glob("rank-*.bin")):
        num_bytes = path.stat().st_size
        records = _read_file(path, form)
        files.append(RankFile(path, records, num_bytes // size - len(records), num_bytes % size))
    return files


def _read_file(path: Path, form: Form, begin: int = 0) -> Records:
    num_records = max(0, os.path.getsize(path) - begin) // form.itemsize
    return whole_records(np.fromfile(path, dtype=form, count=num_records, offset=begin))
