"""Processes that end with the one that started them."""

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Get SIGTERM when the parent ends, however it ends: whoever kills a command means what it runs.

    For ``preexec_fn``. Elsewhere than on Linux nothing happens.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
