"""What counts as progress of a process, on a clock that only the test moves."""

import threading

import pytest
import torch
import torch.distributed as dist

from helpers.processes import run_ranks
from ppl_eval.config import activity
from ppl_eval.distributed.progress import SCORING, Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched():
    """A function that moves the clock and returns the seconds without progress; windows are being scored."""
    activity.begin()
    activity.enter(SCORING)
    activity.finished([0])
    clock = Clock()
    progress = Progress(clock)
    progress.look()

    def after(seconds):
        clock.now += seconds
        return progress.look()

    yield after
    activity.begin()


def test_silence_grows_until_a_tick(watched):
    assert [watched(10), watched(10)] == [10, 20]
    activity.tick()
    assert watched(10) == 0
    assert watched(10) == 10


def test_waiting_for_others_is_no_standstill(watched):
    with activity.waiting():
        assert [watched(10), watched(10)] == [0, 0]
    # The tick at its end.
    assert watched(10) == 0
    assert watched(10) == 10


def test_computing_counts_before_the_first_window_only(watched):
    def spin():
        sum(range(3_000_000))

    spin()
    assert watched(0.05) == 0.05
    activity.now.window = None
    spin()
    assert watched(0.05) == 0


@run_ranks(2)
def test_a_rank_inside_a_collective_waits():
    """The watch looks from a thread of its own, while the main thread is in gloo."""
    store = dist.distributed_c10d._get_default_store()
    clock, number = Clock(), torch.ones(1)
    progress = Progress(clock)
    activity.enter(SCORING)
    activity.finished([0])
    progress.look()

    def look():
        # Until the main thread is in the collective, it stands still.
        while progress.look():
            clock.now += 10
        store.set("seen", "")

    if dist.get_rank() == 1:
        store.wait(["seen"])
        dist.all_reduce(number)
        return
    clock.now = 10
    watcher = threading.Thread(target=look)
    watcher.start()
    dist.all_reduce(number)
    watcher.join()
