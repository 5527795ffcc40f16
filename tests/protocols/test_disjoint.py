"""Windows side by side: by hand."""

import numpy as np
import pytest

from helpers.windows import scored, scored_once, windows_of
from ppl_eval import protocols


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1, 2, 3], [5, 6, 7]]),
        ({"keep_tail": True}, [[1, 2, 3], [5, 6, 7], [9, 10]]),
        ({"bos": "each_window"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"bos": "each_window", "keep_tail": True}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    ],
)
def test_scored_targets_of_eleven_tokens(options, expected):
    assert scored(protocols.disjoint(4, **options), 11) == expected


def test_a_tail_of_one_token_needs_bos_before_it():
    assert scored(protocols.disjoint(4, keep_tail=True), 9) == [[1, 2, 3], [5, 6, 7]]
    with_bos = protocols.disjoint(4, keep_tail=True, bos="each_window")
    assert scored_once(with_bos, 9) == list(range(9))
    assert windows_of(with_bos, 9).prefix.all()


def test_published_window_count_of_wikitext2():
    assert protocols.disjoint(2048).num_windows(np.array([341_469])).tolist() == [166]


def test_a_dropped_tail_is_noted():
    note = "3 tokens after the last whole window are not scored, as in the protocol's reference"
    assert protocols.disjoint(4).notes(np.array([11])) == [note]
    assert protocols.disjoint(4).notes(np.array([12])) == []
    assert protocols.disjoint(4, keep_tail=True).notes(np.array([11])) == []


def test_parameters_in_the_result():
    protocol = protocols.disjoint(4, keep_tail=True)
    assert (protocol.name, protocol.prefix_rule) == ("disjoint", None)
    assert protocol.parameters == {
        "max_seq_len": 4,
        "join": "\n\n",
        "keep_tail": True,
        "bos": "tokenizer",
        "special_tokens": "parse",
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: protocols.disjoint(1), "protocol.max_seq_len is 1; it must be a whole number of at least 2"),
        (lambda: protocols.disjoint(True), "protocol.max_seq_len is True"),
        (lambda: protocols.disjoint("8"), "protocol.max_seq_len is '8'"),
        (lambda: protocols.disjoint(8, bos="yes"), "protocol.bos is 'yes'; allowed: tokenizer, always"),
    ],
)
def test_parameters_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
