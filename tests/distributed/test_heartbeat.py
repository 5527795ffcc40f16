"""Heartbeats on a clock that only the test moves."""

import pytest
import torch.distributed as dist

from ppl_eval.distributed.agreement import Node, group_by_node
from ppl_eval.distributed.heartbeat import Heartbeats

NODES = [Node("0", "a", [0, 1]), Node("1", "b", [2]), Node("2", "c", [3, 4, 5])]
RANKS = range(6)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ranks(clock):
    store = dist.HashStore()
    return [Heartbeats(store, NODES, rank, clock) for rank in RANKS]


def pass_time(clock, seconds, beating):
    for _ in range(seconds):
        clock.now += 1
        for heartbeats in beating:
            heartbeats.beat({"phase": "scoring", "window": 7, "process": ""})


def without(ranks, *silent):
    return [heartbeats for rank, heartbeats in enumerate(ranks) if rank not in silent]


def test_nobody_is_lost_while_all_beat(clock, ranks):
    pass_time(clock, 100, ranks)
    assert [heartbeats.lost(5) for heartbeats in ranks] == [None] * len(ranks)


@pytest.mark.parametrize("silent", RANKS)
def test_every_rank_is_watched_by_another_of_its_host_or_by_every_host(clock, ranks, silent):
    pass_time(clock, 3, ranks)
    others = without(ranks, silent)
    pass_time(clock, 14, others)
    found = {h.rank: lost.ranks for h in others if (lost := h.lost(9)) is not None}
    assert found
    assert set(map(tuple, found.values())) == {(silent,)}
    (host,) = (node for node in NODES if silent in node.ranks)
    if len(host.ranks) > 1:
        assert set(found) & set(host.ranks)


def test_a_lost_rank_is_named_with_its_phase_and_window(clock, ranks):
    pass_time(clock, 3, ranks)
    pass_time(clock, 14, without(ranks, 3))
    # Rank 0 read before rank 3 wrote, rank 4 after that.
    for rank, seconds in ((0, 13), (4, 14)):
        silence = f"no sign of life for {seconds} s (phase 'scoring', last finished window 7)"
        assert ranks[rank].lost(9).message == f"rank 3 on c does not answer: {silence}"
    assert ranks[0].lost(14) is None


def test_hosts_that_stopped_are_named_with_their_ranks(clock, ranks):
    pass_time(clock, 3, ranks)
    pass_time(clock, 14, ranks[:2])
    state = "(phase 'scoring', last finished window 7)"
    assert ranks[0].lost(9).message == (
        f"host b (rank 2) cannot be reached: nothing was heard for 13 s {state}; "
        f"host c (rank 3-5) cannot be reached: nothing was heard for 13 s {state}"
    )
    assert ranks[0].lost(14) is None


def test_a_host_that_never_wrote_is_lost_from_the_start(clock, ranks):
    pass_time(clock, 14, ranks[:3])
    assert ranks[2].lost(9).message == "host c (rank 3-5) cannot be reached: nothing was heard for 14 s"


def test_a_rank_that_left_is_not_missed(clock, ranks):
    pass_time(clock, 2, ranks)
    ranks[3].leave()
    pass_time(clock, 100, without(ranks, 3))
    assert [heartbeats.lost(10) for heartbeats in without(ranks, 3)] == [None] * 5


def test_a_rank_that_slept_blames_nobody(clock, ranks):
    pass_time(clock, 2, ranks)
    clock.now += 1000
    pass_time(clock, 1, ranks[:1])
    assert ranks[0].lost(10) is None
    pass_time(clock, 16, ranks[:1])
    assert ranks[0].lost(10) is not None


def test_a_rank_whose_connection_broke_watches_every_host_at_once(clock, ranks):
    pass_time(clock, 2, ranks)
    assert ranks[5].lost(6) is None
    ranks[5].watch_all_hosts()
    pass_time(clock, 13, [ranks[5]])
    assert {0, 1, 2} <= set(ranks[5].lost(6).ranks)


def test_nodes_are_told_by_their_names_not_their_hosts():
    reports = [{"node": node, "host": "same"} for node in ("0", "1", "0")]
    assert group_by_node(reports) == [Node("0", "same", [0, 2]), Node("1", "same", [1])]
