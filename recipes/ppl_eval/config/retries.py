"""Failures that pass: of a network, and of a file system across one. What failed so is tried again.

Each attempt after the first is told in one line, and there is a limit: what fails for longer is an error.
"""

import errno
import io
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ppl_eval.config import activity

T = TypeVar("T")

# For how long a read is tried again: a server that starts anew, or moves to another machine.
PATIENCE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 8.0
_ERRNOS = {
    errno.EIO,  # What a soft mount reports when its server does not answer.
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    socket.EAI_AGAIN,  # A name server that did not answer.
}
# Of a hub: too many requests, and servers that are overloaded or being replaced.
_STATUS_CODES = {408, 429, 500, 502, 503, 504}


def is_transient(error: BaseException) -> bool:
    """Return whether the same attempt may succeed a little later.

    Libraries wrap the error of the network into one of their own: the chain of causes is looked through.
    """
    for cause in _chain(error):
        code = getattr(getattr(cause, "response", None), "status_code", None)
        late = isinstance(cause, TimeoutError)
        if late or code in _STATUS_CODES or getattr(cause, "errno", None) in _ERRNOS:
            return True
    return False


def retry(
    work: Callable[[], T],
    what: str,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    is_transient: Callable[[BaseException], bool] = is_transient,
) -> T:
    """Do something, and do it again, after pauses that grow, while it fails in a way that may pass.

    Args:
        work: what to do; it must leave nothing half done.
        what: names it in the line that tells of a failure.
        patience_seconds: from the first failure to the last attempt.
        is_transient: whether a failure may pass.

    Returns:
        What ``work`` returned.

    Raises:
        Exception: the last one of ``work``.
    """
    pause, deadline = _FIRST_PAUSE_SECONDS, None
    while True:
        try:
            return work()
        except Exception as error:
            now = time.monotonic()
            deadline = deadline or now + patience_seconds
            if not is_transient(error) or now + pause > deadline:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"{what}: {reason}; trying again in {pause:g} s", flush=True)
            activity.tick()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def open_patiently(path: Path) -> io.BufferedReader:
    """Open a file for reading bytes; reads that fail in a way that may pass are tried again."""
    return io.BufferedReader(_PatientFile(path), 1 << 20)


class _PatientFile(io.RawIOBase):
    """A file that is opened anew, at the same place, where the system lost it (ESTALE) or its server."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._file = retry(lambda: io.FileIO(path), f"{path} cannot be opened")
        self._stamp, self._anything_read = _stamp(self._file), False
        self.name = str(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = self._file.seek(offset, whence)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        again = False

        def read() -> int:
            nonlocal again
            if again:
                self._open_anew()
            again = True
            return self._file.readinto(buffer) or 0

        size = retry(read, f"{self._path} cannot be read")
        self._place += size
        self._anything_read = True
        return size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _open_anew(self) -> None:
        anew = io.FileIO(self._path)
        if self._anything_read and _stamp(anew) != self._stamp:
            anew.close()
            raise ValueError(f"{self._path} was replaced while it was read; start again")
        self._file.close()
        self._file, self._stamp = anew, _stamp(anew)
        self._file.seek(self._place)


def _stamp(file: io.FileIO) -> tuple[int, int]:
    at = os.fstat(file.fileno())
    return at.st_size, at.st_mtime_ns


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
