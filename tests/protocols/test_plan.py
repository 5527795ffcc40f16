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
    windows = plan.locate(plan.batch_ids(1))
    assert list(zip(windows.document, windows.score_start, windows.stop, strict=True)) == [
        (2, 1, 4),
        (0, 9, 11),
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
    assert plan.batch_ids(plan.num_batches - 1).tolist() == [10**9 - k for k in range(8, 0, -1)]


def test_batches_take_the_longest_windows_of_a_group_first():
    plan = plan_for([3, 9, 5, 9, 2, 4], protocols.per_sample(16))
    assert [plan.batch_ids(batch).tolist() for batch in range(3)] == [[1, 3], [2, 5], [0, 4]]
    assert plan.places(np.arange(6)).tolist() == [4, 0, 2, 1, 5, 3]


def test_batches_of_one_window_keep_the_order_of_the_documents():
    plan = make_plan(protocols.per_sample(16), np.cumsum([0, 3, 9, 5]), batch_size=1)
    assert plan.ids(0, 3).tolist() == [0, 1, 2]


@given(st.integers(1, 2000), st.integers(1, 4), st.integers(0, 2**32 - 1), st.data())
def test_every_window_has_one_place(num_documents, batch_size, seed, data):
    lengths_D = np.random.default_rng(seed).integers(2, 60, num_documents)
    plan = make_plan(protocols.rolling(20), np.cumsum([0, *lengths_D]), batch_size)
    whole = plan.ids(0, plan.num_windows)
    assert np.sort(whole).tolist() == list(range(plan.num_windows))
    first, last = sorted(data.draw(st.lists(st.integers(0, plan.num_windows), min_size=2, max_size=2)))
    assert plan.ids(first, last).tolist() == whole[first:last].tolist()
    some = np.sort(whole[first:last])
    assert whole[plan.places(some)].tolist() == some.tolist()
    assert plan.targets_at(first, last) == plan.locate(some).num_targets.sum()


def test_little_padding_is_left_among_samples_of_all_lengths():
    # Chats: most are short, a few long.
    lengths_D = np.random.default_rng(0).lognormal(5, 0.8, 5000).astype(int).clip(4, 2048)
    plan = make_plan(protocols.per_sample(2048), np.cumsum([0, *lengths_D]), batch_size=16)
    widths = [plan.locate(plan.batch_ids(batch)).num_inputs.max() for batch in range(plan.num_batches)]
    computed, needed = 16 * sum(widths), (lengths_D - 1).sum()
    assert computed / needed < 1.05


def test_windows_left_out_on_request_are_noted():
    assert plan_for([40], protocols.disjoint(4), max_windows=3).notes() == [
        "max_windows: only the first 3 of 10 windows are scored"
    ]
    assert not any("max_windows" in note for note in plan_for([40], protocols.disjoint(4)).notes())
