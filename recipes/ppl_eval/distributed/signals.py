"""Signals that end the run, seen while the main thread is in a kernel or a collective and runs no Python."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

# Of a scheduler that takes the machine away, and of a terminal that closes.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def listen(act: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Call a function, in a thread of its own, with each of ``SIGNALS`` that comes.

    Python runs handlers in the main thread, and only between two of its instructions; but the number of the
    signal is written to a pipe at once. A signal that the person has this process ignore (nohup) stays so.

    Returns:
        A function that ends this.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {
        number: signal.signal(number, lambda *_: None)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    waker = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        while number := os.read(reader, 1):
            if number[0] in before:
                act(signal.Signals(number[0]))
        os.close(reader)

    threading.Thread(target=read, name="signal-watch", daemon=True).start()
    listening = True

    def forget() -> None:
        # A forked child (a pool of some library) has the same pipe: the signal that ends it would count here.
        if listening:
            signal.set_wakeup_fd(-1)
            for number in before:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)

    def end() -> None:
        nonlocal listening
        listening = False
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            with suppress(TypeError):  # None: not installed from Python.
                signal.signal(number, handler)
        os.close(writer)

    return end
