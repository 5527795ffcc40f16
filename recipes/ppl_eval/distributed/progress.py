"""Whether this process gets on with its work, as it can tell by itself."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ppl_eval.config import activity

SCORING = "scoring"
# While loading and reading, so much of a core or of input and output is progress. Both are above what the
# threads of the watch need.
_CORE_SHARE = 0.05
_BYTES_PER_SECOND = 1 << 16
# Innermost functions of a process that waits in one of these are waiting for another process.
_WAITING_CODE = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}filelock{os.sep}")
_LAUNCHER_CODE = f"{os.sep}elastic{os.sep}"
_INNERMOST = 4


class Progress:
    """The time since this process last got on with its work.

    A tick (``activity``) is progress; so is waiting for others, whose own watch knows them better. Outside
    scoring, and until the first window is finished, computing and reading are progress too: libraries that
    tokenise, download or compile tick for nobody.

    Args:
        clock: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticks = -1
        self._looked = self._moved = clock()
        self._cpu, self._bytes = _usage()

    def look(self) -> float:
        """Return the seconds without progress."""
        now, record = self._clock(), activity.now
        cpu, num_bytes = _usage()
        seconds = max(now - self._looked, 1e-9)
        computes = cpu - self._cpu > _CORE_SHARE * seconds
        busy = computes or num_bytes - self._bytes > _BYTES_PER_SECOND * seconds
        counts = record.phase != SCORING or record.window is None
        if record.ticks != self._ticks or (busy and counts) or _is_waiting():
            self._moved = now
        self._ticks, self._looked, self._cpu, self._bytes = record.ticks, now, cpu, num_bytes
        return now - self._moved

    def forgive(self) -> None:
        """Begin anew: this process slept."""
        self._moved = self._looked = self._clock()


def place() -> str:
    """Return where the main thread is, as text: file, line and function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "unknown"
    last = traceback.extract_stack(frame)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _is_waiting() -> bool:
    if activity.now.waits > 0:
        return True
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if any(part in file for part in _WAITING_CODE) and _LAUNCHER_CODE not in file:
            return True
        frame = frame.f_back
    return False


def _usage() -> tuple[float, int]:
    """Return CPU seconds, and bytes read and written, of this process and its finished children."""
    times = os.times()
    cpu = times.user + times.system + times.children_user + times.children_system
    num_bytes = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name in ("rchar", "wchar", "read_bytes"):
                num_bytes += int(value)
    return cpu, num_bytes
