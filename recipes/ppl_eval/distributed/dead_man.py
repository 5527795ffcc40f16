"""A timer of the kernel that ends this process unless it is wound up again and again.

A stopped process (SIGSTOP) runs no code that could end it, and where it is the only rank of its host no
neighbour does either: its launcher would wait for it long after all other hosts have given up.
"""

import ctypes
import signal
import sys
import time
from contextlib import suppress

_SIGEV_SIGNAL = 0


class _SigEvent(ctypes.Structure):
    # struct sigevent of Linux on 64 bits: the value to hand over, signal and kind, and room up to 64 bytes.
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class DeadMan:
    """The timer; where the system has none, nothing happens.

    It counts while the process is stopped, but not while the machine sleeps, and no child inherits it.

    Args:
        seconds: from one ``wind`` to the end of this process.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: ctypes.c_void_p | None = None
        if sys.platform != "linux":
            return
        self._libc = ctypes.CDLL(None)
        event = _SigEvent(signo=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        timer = ctypes.c_void_p()
        with suppress(AttributeError):  # A C library before glibc 2.34 has it elsewhere.
            if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
                self._timer = timer

    def wind(self) -> None:
        """Begin to count anew."""
        if self._timer is not None:
            whole = int(self._seconds)
            spec = _TimerSpec(0, 0, whole, int((self._seconds - whole) * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        """Count no more, for good."""
        if self._timer is not None:
            self._libc.timer_delete(self._timer)
            self._timer = None
