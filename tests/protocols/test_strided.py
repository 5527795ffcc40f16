"""Overlapping windows of the transformers documentation: by hand."""

import numpy as np
import pytest

from helpers.windows import scored, scored_once, windows_of
from ppl_eval import protocols
from ppl_eval.protocols.base import ScoredSums


@pytest.mark.parametrize(
    ("stride", "bos", "expected"),
    [
        (2, "tokenizer", [[1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]),
        (4, "tokenizer", [[1, 2, 3], [5, 6, 7], [9, 10]]),
        (2, "each_window", [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]),
    ],
)
def test_scored_targets_of_eleven_tokens(stride, bos, expected):
    assert scored(protocols.strided(4, stride, bos=bos), 11) == expected


def test_windows_start_a_stride_apart():
    assert windows_of(protocols.strided(4, 2), 11).start.tolist() == [0, 2, 4, 6, 8]


def test_a_last_window_with_nothing_to_score_is_left_out():
    assert scored_once(protocols.strided(4, 4), 9) == [1, 2, 3, 5, 6, 7]
    assert scored_once(protocols.strided(4, 4, bos="each_window"), 9) == list(range(9))


@pytest.mark.parametrize(("stride", "weights"), [(2, [3, 1, 1, 1, 0]), (4, [3, 3, 2])])
def test_weights_of_the_documentation_script(stride, weights):
    protocol = protocols.strided(4, stride, weighting="hf_doc")
    assert protocol.window_weights(windows_of(protocol, 11)).tolist() == weights
    assert protocols.strided(4, stride).window_weights(windows_of(protocol, 11)) is None


def test_figures():
    sums = ScoredSums(
        nll_sum=6.0, nll_sq_sum=14.0, num_tokens=4, weighted_nll_sum=2.5, weight_sum=2, num_words=4
    )
    figures = protocols.strided(4, 2, weighting="hf_doc").figures(sums)
    assert figures["ce_loss"] == 1.25
    assert figures["perplexity"] == pytest.approx(np.exp(1.25))
    assert figures["perplexity_exact_weighting"] == pytest.approx(np.exp(1.5))
    assert protocols.strided(4, 2).figures(sums) == {}


def test_parameters_in_the_result():
    exact, published = protocols.strided(4, 2), protocols.strided(4, 2, "hf_doc")
    assert (exact.name, exact.denominator) == ("strided", "scored tokens")
    assert published.denominator == "window means weighted by t-1"
    assert exact.parameters == {
        "max_seq_len": 4,
        "stride": 2,
        "weighting": "exact",
        "join": "\n\n",
        "bos": "tokenizer",
        "special_tokens": "parse",
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: protocols.strided(8, 0), "protocol.stride is 0; it must be a whole number from 1 to 8"),
        (lambda: protocols.strided(8, 9), "protocol.stride is 9"),
        (lambda: protocols.strided(8, 2.5), "protocol.stride is 2.5"),
        (
            lambda: protocols.strided(1, 1),
            "protocol.max_seq_len is 1; it must be a whole number of at least 2",
        ),
        (lambda: protocols.strided(8, 2, weighting="mean"), "protocol.weighting is 'mean'; allowed: exact"),
        (
            lambda: protocols.strided(8, 2, weighting="hf_doc", bos="each_window"),
            "protocol.bos is 'each_window'; allowed: tokenizer, always, never$",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
