"""Windows, plan, sampler, batches and coverage: hand numbers and properties; no model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval import protocols
from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols import coverage
from ppl_eval.protocols.batches import WindowBatches, expected_hash_sums, scored_hash_sums
from ppl_eval.protocols.plan import make_plan
from ppl_eval.protocols.sampler import DUMMY_BATCH, ExactDistributedSampler

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def token_data(document_lengths, labels=None):
    offsets = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int64)
    zeros = np.zeros(len(document_lengths), dtype=np.int64)
    tokens = np.arange(100, 100 + offsets[-1], dtype=np.uint16)
    return TokenData(tokens, offsets, zeros, zeros, len(document_lengths), {}, (), labels)


def plan_for(data, protocol, batch_size=2, max_windows=None):
    return make_plan(protocol, data.offsets_D1, batch_size, max_windows)


def test_disjoint_by_hand():
    data = token_data([11])
    windows = plan_for(data, protocols.disjoint(4)).windows(0, 2)
    assert list(zip(windows.score_start, windows.stop, strict=True)) == [(1, 4), (5, 8)]
    windows = plan_for(data, protocols.disjoint(4, keep_tail=True)).windows(0, 3)
    assert list(zip(windows.score_start, windows.stop, strict=True)) == [(1, 4), (5, 8), (9, 11)]


def test_batch_tensors_by_hand():
    data = token_data([11])
    batches = WindowBatches(plan_for(data, protocols.disjoint(4, keep_tail=True)), data)
    first, last = batches[0], batches[1]
    # Padded to a multiple of 8, but no longer than the model may see at once: 4.
    assert first.tokens_BT.tolist() == [[100, 101, 102, 0], [104, 105, 106, 0]]
    assert first.labels_BT.tolist() == [[101, 102, 103, -100], [105, 106, 107, -100]]
    assert first.window_ids_B.tolist() == [0, 1]
    assert last.tokens_BT.tolist() == [[108, 109, 0, 0]]
    assert last.labels_BT.tolist() == [[109, 110, -100, -100]]


def test_inputs_are_padded_to_a_multiple_of_8():
    data = token_data([30])
    widths = [
        WindowBatches(plan_for(data, protocols.disjoint(length)), data)[0].tokens_BT.shape[1]
        for length in (7, 9, 10, 16, 17, 18)
    ]
    assert widths == [7, 8, 10, 16, 16, 18]


def test_short_windows_are_padded_and_their_padding_is_not_scored():
    data = token_data([7])
    batch = WindowBatches(plan_for(data, protocols.disjoint(4, keep_tail=True)), data)[0]
    assert batch.tokens_BT.tolist() == [[100, 101, 102, 0], [104, 105, 0, 0]]
    assert batch.labels_BT.tolist() == [[101, 102, 103, -100], [105, 106, -100, -100]]


def test_masked_labels_are_neither_scored_nor_counted():
    labels = np.arange(100, 108, dtype=np.int32)
    labels[[2, 3, 4]] = -100
    data = token_data([8], labels)
    plan = plan_for(data, protocols.disjoint(4))
    batch = WindowBatches(plan, data)[0]
    assert batch.labels_BT.tolist() == [[101, -100, -100, -100], [105, 106, 107, -100]]
    only = coverage.hash_sums(np.zeros(4, dtype=np.int64), np.array([1, 5, 6, 7]))
    assert batch.scored_hash_sums.tolist() == only.tolist()
    assert expected_hash_sums(plan, data, 0, 1).tolist() == only.tolist()


def test_dummy_batch_scores_nothing():
    data = token_data([8])
    batch = WindowBatches(plan_for(data, protocols.disjoint(4)), data)[DUMMY_BATCH]
    assert (batch.labels_BT == -100).all()
    assert len(batch.window_ids_B) == 0
    assert not batch.scored_hash_sums.any()


@given(lengths, st.integers(2, 9), st.booleans(), st.integers(1, 4))
def test_closed_formula_counts_what_the_windows_score(document_lengths, max_seq_len, keep_tail, max_windows):
    data = token_data(document_lengths)
    protocol = protocols.disjoint(max_seq_len, keep_tail=keep_tail)
    if not protocol.num_windows(np.diff(data.offsets_D1)).sum():
        return
    for limit in (None, max_windows):
        plan = plan_for(data, protocol, max_windows=limit)
        assert plan.expected_targets() == plan.windows(0, plan.num_windows).num_targets.sum()


@given(st.integers(0, 30), st.integers(1, 7), st.booleans())
def test_every_batch_runs_once(num_batches, num_replicas, equal_steps):
    samplers = [
        ExactDistributedSampler(num_batches, num_replicas, r, equal_steps) for r in range(num_replicas)
    ]
    steps = [list(sampler) for sampler in samplers]
    assert sorted(b for run in steps for b in run if b != DUMMY_BATCH) == list(range(num_batches))
    assert [len(sampler) for sampler in samplers] == [len(run) for run in steps]
    if equal_steps:
        assert len({len(run) for run in steps}) == 1
    else:
        assert all(b != DUMMY_BATCH for run in steps for b in run)


def test_sampler_goes_on_where_its_state_says():
    sampler = ExactDistributedSampler(7, 2, 1)
    steps = iter(sampler)
    assert [next(steps), next(steps)] == [1, 3]
    other = ExactDistributedSampler(7, 2, 1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == [5]
    assert list(other) == [1, 3, 5], "a second pass starts at the beginning"
    with pytest.raises(ValueError, match="9 steps"):
        other.load_state_dict({"yielded": 9})


@given(lengths, st.integers(2, 6), st.integers(1, 5))
def test_expected_hash_is_shared_out_without_gap(document_lengths, max_seq_len, num_ranks):
    data = token_data(document_lengths)
    protocol = protocols.disjoint(max_seq_len)
    if not protocol.num_windows(np.diff(data.offsets_D1)).sum():
        return
    plan = plan_for(data, protocol)
    shares = [expected_hash_sums(plan, data, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(shares).tolist() == scored_hash_sums(plan.windows(0, plan.num_windows), data).tolist()


def test_hash_sees_a_token_missed_doubled_or_moved():
    def lanes(pairs):
        document, position = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
        return coverage.hash_sums(document, position).tolist()

    whole = [(0, 1), (0, 2), (1, 1)]
    assert lanes(whole) == lanes(reversed(whole))
    for other in (whole[:2], [*whole, (0, 1)], [(0, 1), (0, 2), (1, 2)], [(1, 0), (0, 2), (1, 1)]):
        assert lanes(other) != lanes(whole)


def test_too_short_a_text_says_how_short():
    with pytest.raises(ValueError, match=r"3 tokens.*not enough for one window.*max_seq_len"):
        plan_for(token_data([3]), protocols.disjoint(4))


def test_a_plan_of_a_billion_windows_takes_no_memory():
    plan = make_plan(protocols.disjoint(2048), np.array([0, 2048 * 10**9], dtype=np.int64), batch_size=8)
    assert plan.num_windows == 10**9
    assert plan.expected_targets() == 2047 * 10**9
    assert plan.batch_windows(plan.num_batches - 1).start.tolist() == [
        2048 * (10**9 - k) for k in range(8, 0, -1)
    ]


def test_windows_left_out_on_request_are_noted():
    data = token_data([40])
    assert plan_for(data, protocols.disjoint(4), max_windows=3).notes() == [
        "max_windows: only the first 3 of 10 windows are scored"
    ]
    assert not any("max_windows" in note for note in plan_for(data, protocols.disjoint(4)).notes())
