"""Several batches at once in one CPU process, each on its share of the threads.

Many operations of a forward are too small to be divided among threads, whole forwards are not. A lane runs
the same kernels on the same shapes as a process of its own would, and `ppl_eval` has MKL give the same bits
for any number of threads, so lanes change no bit of a result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Two keep the cores busy: one computes where the other waits for Python, for memory or for the head. More
# would only take more memory.
MAX_LANES = 2
# Longer batches fill the cores by themselves, and their activations are what memory goes to.
MAX_BATCH_TOKENS = 16_384


def number_of_lanes(device: torch.device, alone: bool, batch_tokens: int) -> int:
    """How many batches this process scores at once.

    Args:
        device: where it scores; only a CPU's threads can be divided.
        alone: whether a forward is this process's own business, and not compiled. Ranks that share a forward
            must come to its collectives in the same order, and a compiler is not for two threads at once.
        batch_tokens: most tokens in a batch.
    """
    # An odd number of threads would leave one without a lane.
    divisible = torch.get_num_threads() % MAX_LANES == 0
    suitable = device.type == "cpu" and alone and divisible and batch_tokens <= MAX_BATCH_TOKENS
    return MAX_LANES if suitable else 1


def map_in_lanes(
    function: Callable[[T], R], items: Iterable[T], num_items: int, num_lanes: int
) -> Iterator[tuple[T, R]]:
    """Each item with what `function` makes of it, in the order of the items; `num_lanes` of them at once.

    An error of `function` is raised where its result would have come. Items are taken a lane's worth ahead of
    the results. What does not divide by the lanes comes first, one by one on all threads, so that no lane
    stands still at the end.
    """
    items = iter(items)
    for item in islice(items, num_items % num_lanes if num_lanes > 1 else None):
        yield item, function(item)
    if num_lanes == 1:
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        num_lanes, "lane", initializer=torch.set_num_threads, initargs=(max(1, threads // num_lanes),)
    )
    try:
        running: deque[tuple[T, Future[R]]] = deque()
        for item in items:
            running.append((item, pool.submit(function, item)))
            if len(running) > num_lanes:
                done, future = running.popleft()
                yield done, future.result()
        for done, future in running:
            yield done, future.result()
    finally:
        # Without waiting: after an error, nobody should hear of it only when the other lane is done.
        pool.shutdown(wait=False, cancel_futures=True)
        # MKL has one number for the whole process.
        torch.set_num_threads(threads)
