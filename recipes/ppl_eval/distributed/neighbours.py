"""The processes of this node: who they are to the operating system, and whether they still run."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def identity() -> str:
    """Return what tells this process from every other on its machine: pid namespace, pid and start."""
    return _describe(os.getpid()) or ""


def is_gone(process: str) -> bool:
    """Return whether the process of an ``identity`` has ended; False where this process cannot know."""
    known = _known(process)
    return known is not None and _describe(known) != process


def end(process: str) -> None:
    """End a process that no longer answers; a stopped one ends too."""
    known = _known(process)
    if known is not None and _describe(known) == process:
        with suppress(OSError):
            os.kill(known, signal.SIGKILL)


def _known(process: str) -> int | None:
    namespace, _, rest = process.partition(" ")
    own = identity().partition(" ")[0]
    return int(rest.split()[0]) if rest and namespace == own else None


def _describe(pid: int) -> str | None:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        # Fields after the name, which may hold spaces: state first, start time the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{namespace} {pid} {fields[19]}"
