"""Several batches at once in one CPU process, each on its share of the threads.

Many operations of a forward are too small to be divided among threads, whole forwards are not. Each batch
runs the same kernels on the same shapes as it would alone, and ``ppl_eval`` has MKL give the same bits for
any number of threads, so concurrency changes no bit of a result.
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
MAX_CONCURRENT_BATCHES = 2
# Longer batches fill the cores by themselves, and their activations are what memory goes to.
MAX_BATCH_TOKENS = 16_384


def num_concurrent_batches(device: torch.device, alone: bool, batch_tokens: int) -> int:
    """Return how many batches this process scores at once.

    Args:
        device: where it scores; only a CPU's threads can be divided.
        alone: whether a forward is this process's own business, and not compiled. Ranks that share a forward
            must come to its collectives in the same order, and a compiler is not for two threads at once.
        batch_tokens: most tokens in a batch.
    """
    # An odd number of threads would leave one idle.
    divisible = torch.get_num_threads() % MAX_CONCURRENT_BATCHES == 0
    suitable = device.type == "cpu" and alone and divisible and batch_tokens <= MAX_BATCH_TOKENS
    return MAX_CONCURRENT_BATCHES if suitable else 1


def map_concurrently(
    function: Callable[[T], R], items: Iterable[T], num_items: int | None, num_concurrent: int
) -> Iterator[tuple[T, R]]:
    """Yield each item with its result, in the order of the items.

    An error of ``function`` is raised where its result would have come. Items are taken at most
    ``num_concurrent`` ahead of the results. The remainder of ``num_items`` by ``num_concurrent`` comes first,
    one item at a time on all threads, so that no thread is idle at the end; where the number is not known,
    the last item may have only its share of them.

    Args:
        function: what to compute of each item.
        items: the items.
        num_items: how many there are; None if that is not known beforehand.
        num_concurrent: how many are computed at once.
    """
    items = iter(items)
    for item in islice(items, (num_items or 0) % num_concurrent if num_concurrent > 1 else None):
        yield item, function(item)
    if num_concurrent == 1:
        return
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        num_concurrent,
        "batch",
        initializer=torch.set_num_threads,
        initargs=(max(1, threads // num_concurrent),),
    )
    try:
        running: deque[tuple[T, Future[R]]] = deque()
        for item in items:
            running.append((item, pool.submit(function, item)))
            if len(running) > num_concurrent:
                done, future = running.popleft()
                yield done, future.result()
        for done, future in running:
            yield done, future.result()
    finally:
        # Without waiting: an error is raised at once, not when the batches beside it are done.
        pool.shutdown(wait=False, cancel_futures=True)
        # MKL has one number for the whole process.
        torch.set_num_threads(threads)
