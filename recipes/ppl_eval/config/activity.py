"""What this process is doing, kept by those who work and read by those who watch that the work goes on.

One process, one record: passing an object through every loader and loop would put it into every signature.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Activity:
    """The record.

    Attributes:
        phase: name of the step.
        ticks: pieces of work done: tensors loaded, layers computed, batches scored. Threads may lose a count
            to each other; that it moves is all that is asked of it.
        waits: above 0 while this process only waits for another.
        window: last finished window; None before the first.
        num_windows: windows finished.
        began: when the step began; seconds of ``time.monotonic``.
    """

    phase: str = "start"
    ticks: int = 0
    waits: int = 0
    window: int | None = None
    num_windows: int = 0
    began: float = 0.0

    def about(self) -> dict[str, Any]:
        """Return the record for others: JSON values."""
        return {
            "phase": self.phase,
            "seconds": round(time.monotonic() - self.began, 1),
            "ticks": self.ticks,
            "window": self.window,
            "num_windows": self.num_windows,
        }

    def describe(self) -> str:
        """Return phase and window as text for messages."""
        return describe(self.phase, self.window)


now = Activity()


def tick() -> None:
    """Count a piece of work."""
    now.ticks += 1


def begin() -> None:
    """Forget what an earlier run in this process did."""
    now.waits, now.window, now.num_windows = 0, None, 0
    enter("start")


def enter(phase: str) -> None:
    """Begin a step."""
    now.phase, now.began = phase, time.monotonic()
    tick()


def finished(windows: Sequence[int]) -> None:
    """Note the windows of a scored batch; a batch that only keeps others company has none."""
    if len(windows):
        now.window = int(windows[-1])
        now.num_windows += len(windows)
    tick()


@contextmanager
def waiting() -> Iterator[None]:
    """Mark what is inside as waiting for another process."""
    now.waits += 1
    try:
        yield
    finally:
        now.waits -= 1
        tick()


def describe(phase: str, window: int | None) -> str:
    """Return a phase and the last finished window as text for messages."""
    return f"phase {phase!r}, {'no window finished' if window is None else f'last finished window {window}'}"
