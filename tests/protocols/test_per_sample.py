"""One sample, one window: by hand."""

import numpy as np
import pytest

from helpers.windows import scored, windows_of
from ppl_eval import protocols


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (protocols.per_sample(10), [list(range(1, 11))]),
        (protocols.per_sample(11, bos="each_window"), [list(range(11))]),
        (protocols.per_sample(4, too_long="truncate"), [[1, 2, 3, 4]]),
        (protocols.per_sample(4, too_long="window"), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
    ],
)
def test_scored_targets_of_eleven_tokens(protocol, expected):
    assert scored(protocol, 11) == expected


def test_a_sample_without_a_target_has_no_window():
    assert protocols.per_sample(4).num_windows(np.array([0, 1, 2])).tolist() == [0, 0, 1]


def test_a_sample_that_is_too_long_is_refused_by_number():
    with pytest.raises(
        ValueError, match=r"sample 1 has 12 tokens and needs 11 inputs.*2 of 3 samples.*too_long=truncate"
    ):
        windows_of(protocols.per_sample(8), 4, 12, 10)
    # Nine tokens are eight inputs.
    assert windows_of(protocols.per_sample(8), 9).num_inputs.tolist() == [8]


def test_what_is_cut_is_noted():
    lengths = np.array([5, 7])
    assert protocols.per_sample(4, "truncate").notes(lengths) == [
        "1 of 2 samples are truncated: 2 targets are not scored (too_long=truncate)"
    ]
    assert protocols.per_sample(4, "window").notes(lengths) == [
        "1 of 2 samples are cut into windows (too_long=window)"
    ]
    assert protocols.per_sample(4).notes(np.array([5])) == []


def test_parameters_in_the_result():
    protocol = protocols.per_sample(4)
    assert (protocol.name, protocol.join, protocol.covers_text) == ("per_sample", None, True)
    assert protocol.parameters == {
        "max_seq_len": 4,
        "too_long": "error",
        "bos": "tokenizer",
        "special_tokens": "parse",
    }
    # Text that nothing scores must not divide what the rest scored.
    assert not protocols.per_sample(4, "truncate").covers_text


def test_parameters_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"protocol.too_long is 'cut'; allowed: error, truncate, window"):
        protocols.per_sample(8, too_long="cut")
