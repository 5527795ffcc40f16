"""The plan: hand numbers and properties; no model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval import protocols
from ppl_eval.protocols.plan import Plan, make_plan

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def plan_for(document_lengths, protocol, max_windows=None) -> Plan:
    offsets = np.cumsum([0, *document_lengths])
    return make_plan(protocol, offsets, batch_size=2, max_windows=max_windows)


def test_windows_and_batches_by_hand():
    plan = plan_for([11, 1, 5], protocols.disjoint(4, keep_tail=True))
    assert (plan.num_windows, plan.num_batches) == (4, 2)
    assert plan.windows_per_document().tolist() == [3, 0, 1]
    windows = plan.batch_windows(1)
    assert list(zip(windows.document, windows.score_start, windows.stop, strict=True)) == [
        (0, 9, 11),
        (2, 1, 4),
    ]


@given(lengths, st.integers(2, 9), st.booleans(), st.integers(1, 4))
def test_closed_formula_counts_what_the_windows_score(document_lengths, max_seq_len, keep_tail, max_windows):
    protocol = protocols.disjoint(max_seq_len, keep_tail=keep_tail)
    if not protocol.num_windows(np.array(document_lengths)).sum():
        return
    for limit in (None, max_windows):
        plan = plan_for(document_lengths, protocol, limit)
        assert plan.expected_targets() == plan.windows(0, plan.num_windows).num_targets.sum()


def test_too_short_a_text_says_how_short():
    with pytest.raises(ValueError, match=r"3 tokens.*not enough for one window.*max_seq_len"):
        plan_for([3], protocols.disjoint(4))


def test_a_plan_of_a_billion_windows_takes_no_memory():
    plan = make_plan(protocols.disjoint(2048), np.array([0, 2048 * 10**9], dtype=np.int64), batch_size=8)
    assert plan.num_windows == 10**9
    assert plan.expected_targets() == 2047 * 10**9
    assert plan.batch_windows(plan.num_batches - 1).start.tolist() == [
        2048 * (10**9 - k) for k in range(8, 0, -1)
    ]


def test_windows_left_out_on_request_are_noted():
    assert plan_for([40], protocols.disjoint(4), max_windows=3).notes() == [
        "max_windows: only the first 3 of 10 windows are scored"
    ]
    assert not any("max_windows" in note for note in plan_for([40], protocols.disjoint(4)).notes())
