"""The processes of this node: who they are to the operating system, and whether they still run."""

import ctypes
import ipaddress
import os
import signal
import socket
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


def hang_up(pid: int) -> None:
    """Close the connections of a process to other hosts, so that it does not wait for an answer there.

    torchrun waits for the store in a call that TCP gives up after a quarter of an hour, and handles no signal
    meanwhile. With its connection closed it ends by itself. Where the system does not allow this (another
    user, a hardened kernel), nothing is done.
    """
    with suppress(OSError, AttributeError):
        process = os.pidfd_open(pid)
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                    _shut_down(_copy(process, int(number)))


def _copy(process: int, number: int) -> int:
    pidfd_getfd = 438  # The same on all architectures; Python has no function for it.
    copied = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, process, number, 0)
    if copied < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copied


def _shut_down(handle: int) -> None:
    with socket.socket(fileno=handle) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            peer = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
            peer = getattr(peer, "ipv4_mapped", None) or peer
            if not peer.is_loopback:
                connection.shutdown(socket.SHUT_RDWR)


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
