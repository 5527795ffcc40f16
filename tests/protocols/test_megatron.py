"""Megatron-LM's overlapping evaluation: by hand."""

import numpy as np
import pytest

from helpers.windows import scored, windows_of
from ppl_eval import protocols
from ppl_eval.protocols.base import ScoredSums


@pytest.mark.parametrize(
    ("overlap_stride", "bos", "expected"),
    [
        (4, "never", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
        (2, "never", [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]),
        (2, "each_window", [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]),
    ],
)
def test_scored_targets_of_eleven_tokens(overlap_stride, bos, expected):
    assert scored(protocols.megatron(4, overlap_stride, bos=bos), 11) == expected


def test_what_the_model_sees():
    assert windows_of(protocols.megatron(4, 2), 11).start.tolist() == [0, 2, 4, 6]
    windows = windows_of(protocols.megatron(4, 2, bos="each_window"), 11)
    assert windows.start.tolist() == [1, 3, 5, 7]
    assert windows.prefix.all()


def test_figures():
    sums = ScoredSums(
        nll_sum=6.0, nll_sq_sum=14.0, num_tokens=4, weighted_nll_sum=0.0, weight_sum=0, num_words=4
    )
    figures = protocols.megatron(4).figures
    assert figures(sums)["adjusted_perplexity"] == pytest.approx(np.exp(2.0))
    assert figures(sums._replace(nll_sum=1e6))["adjusted_perplexity"] == np.inf
    assert figures(sums._replace(num_words=1)) == {}


def test_parameters_in_the_result():
    protocol = protocols.megatron(4)
    assert (protocol.name, protocol.word_separator) == ("megatron", "space")
    # The number in force, not the None that stands for it.
    assert protocol.parameters == {
        "max_seq_len": 4,
        "overlap_stride": 4,
        "join": "",
        "bos": "never",
        "special_tokens": "parse",
    }
    assert list(protocol.parameters) == ["max_seq_len", "overlap_stride", "join", "bos", "special_tokens"]


@pytest.mark.parametrize("overlap_stride", [0, 9])
def test_parameters_out_of_range_are_refused(overlap_stride):
    words = f"protocol.overlap_stride is {overlap_stride}; it must be a whole number from 1 to 8"
    with pytest.raises(ValueError, match=words):
        protocols.megatron(8, overlap_stride)
