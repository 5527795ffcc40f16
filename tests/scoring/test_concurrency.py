"""Concurrent batches: results in order, errors in their place, none taken early, only where it is safe."""

import threading

import pytest
import torch

from ppl_eval.scoring.concurrency import MAX_BATCH_TOKENS, map_concurrently, num_concurrent_batches

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_concurrent", [1, 2, 3])
@pytest.mark.parametrize("num_items", [0, 1, 2, 7])
def test_results_come_in_the_order_of_the_items(num_concurrent, num_items):
    assert list(map_concurrently(lambda x: x * x, range(num_items), num_items, num_concurrent)) == [
        (x, x * x) for x in range(num_items)
    ]


def test_two_items_are_worked_on_at_once():
    meeting = threading.Barrier(2, timeout=60)
    done = list(map_concurrently(lambda _: meeting.wait() >= 0, range(4), 4, 2))
    assert done == [(x, True) for x in range(4)]


def test_no_more_is_taken_ahead_than_runs_at_once():
    taken = []
    results = map_concurrently(lambda x: x, (taken.append(x) or x for x in range(100)), 100, 2)
    for number in range(5):
        assert next(results) == (number, number)
        assert len(taken) <= number + 3
    results.close()


@pytest.mark.parametrize("num_concurrent", [1, 2])
def test_an_error_comes_where_its_result_would_have(num_concurrent):
    def invert(x):
        if x == 2:
            raise ValueError("item 2 is bad")
        return -x

    results = map_concurrently(invert, range(9), 9, num_concurrent)
    assert [next(results), next(results)] == [(0, 0), (1, -1)]
    with pytest.raises(ValueError, match="item 2 is bad"):
        next(results)


def test_an_error_does_not_wait_for_the_batch_beside_it():
    released = threading.Event()

    def work(x):
        if x == 0:
            raise ValueError("item 0 is bad")
        assert released.wait(timeout=60)

    try:
        with pytest.raises(ValueError, match="item 0 is bad"):
            next(map_concurrently(work, range(4), 4, 2))
    finally:
        released.set()


def test_what_does_not_divide_comes_first_on_all_threads():
    names = [name for _, name in map_concurrently(lambda _: threading.current_thread().name, range(5), 5, 2)]
    assert names[0] == threading.current_thread().name
    assert {name.partition("_")[0] for name in names[1:]} == {"batch"}


@pytest.fixture
def threads():
    """``torch.set_num_threads``, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_are_divided_and_given_back(threads):
    threads(4)
    assert [n for _, n in map_concurrently(lambda _: torch.get_num_threads(), range(6), 6, 2)] == [2] * 6
    assert torch.get_num_threads() == 4


def test_only_forwards_of_a_cpu_process_of_its_own_are_divided(threads):
    threads(8)
    assert num_concurrent_batches(CPU, alone=True, batch_tokens=1024) == 2
    assert num_concurrent_batches(CPU, alone=False, batch_tokens=1024) == 1
    assert num_concurrent_batches(CPU, alone=True, batch_tokens=MAX_BATCH_TOKENS + 1) == 1
    assert num_concurrent_batches(torch.device("cuda"), alone=True, batch_tokens=1024) == 1
    for odd in (1, 3):
        threads(odd)
        assert num_concurrent_batches(CPU, alone=True, batch_tokens=1024) == 1
