"""Windows to tensors, by hand: padding, labels, prefix tokens, dummy batches; no model."""

import numpy as np

from helpers.windows import BOS, counted_tokens
from ppl_eval import protocols
from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols import coverage
from ppl_eval.protocols.base import Protocol
from ppl_eval.protocols.batches import WindowBatches, expected_hash_sums, masked_targets
from ppl_eval.protocols.plan import make_plan
from ppl_eval.protocols.sampler import DUMMY_BATCH


def batches(data: TokenData, protocol: Protocol, prefix_token: int | None = None) -> WindowBatches:
    return WindowBatches(make_plan(protocol, data.offsets_D1, batch_size=2), data, prefix_token)


def test_tensors():
    first, last = (batches(counted_tokens(11), protocols.disjoint(4, keep_tail=True))[i] for i in (0, 1))
    # Padded to a multiple of 8, but no longer than the model may see at once: 4.
    assert first.tokens_BT.tolist() == [[100, 101, 102, 0], [104, 105, 106, 0]]
    assert first.labels_BT.tolist() == [[101, 102, 103, -100], [105, 106, 107, -100]]
    assert first.window_ids_B.tolist() == [0, 1]
    assert last.tokens_BT.tolist() == [[108, 109, 0, 0]]
    assert last.labels_BT.tolist() == [[109, 110, -100, -100]]


def test_context_is_seen_and_not_scored():
    made = batches(counted_tokens(9, 4), protocols.strided(4, 2, weighting="hf_doc"))
    # The window of the second document does not see the first; the shortest of all comes last.
    assert made[1].tokens_BT.tolist() == [[104, 105, 106, 0], [109, 110, 111, 0]]
    assert made[1].labels_BT.tolist() == [[-100, 106, 107, -100], [110, 111, 112, -100]]
    assert (made[1].document_B.tolist(), made[1].start_B.tolist()) == ([0, 1], [4, 0])
    assert made[2].tokens_BT.tolist() == [[106, 107, 0, 0]]
    assert made[2].labels_BT.tolist() == [[-100, 108, -100, -100]]
    assert (made[1].window_ids_B.tolist(), made[2].window_ids_B.tolist()) == ([2, 4], [3])


def test_the_prefix_token_stands_before_its_window():
    first = batches(counted_tokens(6, 2), protocols.rolling(4), BOS)[0]
    assert first.tokens_BT.tolist() == [[BOS, 100, 101, 102], [101, 102, 103, 104]]
    assert first.labels_BT.tolist() == [[100, 101, 102, 103], [-100, -100, 104, 105]]
    assert batches(counted_tokens(6, 2), protocols.rolling(4), BOS)[1].tokens_BT.tolist() == [
        [BOS, 106, 0, 0]
    ]


def test_inputs_are_padded_to_a_multiple_of_8():
    data = counted_tokens(30)
    widths = [
        batches(data, protocols.disjoint(length))[0].tokens_BT.shape[1] for length in (7, 9, 10, 16, 17, 18)
    ]
    assert widths == [7, 8, 10, 16, 16, 18]


def test_short_windows_are_padded_and_their_padding_is_not_scored():
    batch = batches(counted_tokens(7), protocols.disjoint(4, keep_tail=True))[0]
    assert batch.tokens_BT.tolist() == [[100, 101, 102, 0], [104, 105, 0, 0]]
    assert batch.labels_BT.tolist() == [[101, 102, 103, -100], [105, 106, -100, -100]]


def test_masked_labels_are_neither_scored_nor_counted():
    labels = np.arange(100, 108, dtype=np.int32)
    labels[[2, 3, 4]] = -100
    data = counted_tokens(8, labels=labels)
    made = batches(data, protocols.disjoint(4))
    assert made[0].labels_BT.tolist() == [[101, -100, -100, -100], [105, 106, 107, -100]]
    only = coverage.hash_sums(np.zeros(4, dtype=np.int64), np.array([1, 5, 6, 7]))
    assert made[0].scored_hash_sums_B4.sum(axis=0).tolist() == only.tolist()
    assert expected_hash_sums(made.plan, data, 0, 1).tolist() == only.tolist()
    # Position 4 begins a window, so that nothing would score it anyway.
    assert masked_targets(made.plan, data) == 2


def test_a_dummy_batch_scores_nothing():
    batch = batches(counted_tokens(8), protocols.disjoint(4))[DUMMY_BATCH]
    assert (batch.labels_BT == -100).all()
    assert len(batch.window_ids_B) == 0
    assert batch.scored_hash_sums_B4.shape == (0, 4)
