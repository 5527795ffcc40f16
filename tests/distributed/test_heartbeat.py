"""Heartbeats on a clock that only the test moves."""

import pytest
import torch.distributed as dist

from ppl_eval.distributed.agreement import Node, group_by_node
from ppl_eval.distributed.heartbeat import SUSPICION_SECONDS, Heartbeats

NODES = [Node("0", "a", [0, 1]), Node("1", "b", [2]), Node("2", "c", [3, 4])]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leaders(clock):
    store = dist.HashStore()
    return [Heartbeats(store, NODES, node.name, True, clock) for node in NODES]


def pass_time(clock, seconds, beating):
    for _ in range(seconds):
        clock.now += 1
        for heartbeats in beating:
            heartbeats.beat()


def test_nobody_is_silent_while_all_beat(clock, leaders):
    pass_time(clock, 100, leaders)
    assert [heartbeats.silent(5) for heartbeats in leaders] == [None] * 3


def test_hosts_that_stopped_are_named_with_their_ranks(clock, leaders):
    pass_time(clock, 3, leaders)
    pass_time(clock, 11, leaders[:1])
    told = leaders[0].silent(9)
    assert told == "host b (rank 2), host c (rank 3-4) cannot be reached: nothing was heard for 10 s"
    assert leaders[0].silent(10) is None


def test_node_that_never_wrote_is_silent_from_the_start(clock, leaders):
    pass_time(clock, 11, leaders[:2])
    assert leaders[1].silent(10) == "host c (rank 3-4) cannot be reached: nothing was heard for 11 s"


def test_node_that_left_is_not_missed(clock, leaders):
    pass_time(clock, 2, leaders)
    leaders[2].leave()
    pass_time(clock, 100, leaders[:2])
    assert leaders[0].silent(10) is None


def test_rank_that_slept_blames_nobody(clock, leaders):
    pass_time(clock, 2, leaders)
    clock.now += 1000
    leaders[0].beat()
    assert leaders[0].silent(10) is None
    pass_time(clock, 11, leaders[:1])
    assert leaders[0].silent(10) is not None


def test_other_ranks_listen_and_do_not_beat_for_their_node(clock, leaders):
    other = Heartbeats(dist.HashStore(), NODES, "1", False, clock)
    pass_time(clock, int(SUSPICION_SECONDS) + 1, [other])
    assert "host a (rank 0-1)" in other.silent(SUSPICION_SECONDS)
    store = dist.HashStore()
    silent, listener = Heartbeats(store, NODES, "1", False, clock), Heartbeats(store, NODES, "0", True, clock)
    pass_time(clock, 11, [silent, listener])
    assert "host b" in listener.silent(10)


def test_nodes_are_told_by_their_names_not_their_hosts():
    reports = [{"node": node, "host": "same"} for node in ("0", "1", "0")]
    assert group_by_node(reports) == [Node("0", "same", [0, 2]), Node("1", "same", [1])]
