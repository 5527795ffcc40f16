"""The chunks of llama-perplexity: by hand."""

import numpy as np
import pytest

from helpers.windows import scored, windows_of
from ppl_eval import protocols
from ppl_eval.protocols.base import ScoredSums


@pytest.mark.parametrize("bos", ["tokenizer", "always", "never"])
def test_scored_targets_of_eleven_tokens(bos):
    assert scored(protocols.llama_cpp(4, bos=bos), 11) == [[3], [7]]
    assert scored(protocols.llama_cpp(5, bos=bos), 11) == [[3, 4], [8, 9]]


def test_bos_takes_the_place_of_each_chunks_first_token():
    windows = windows_of(protocols.llama_cpp(4), 11)
    assert windows.start.tolist() == [1, 5]
    assert windows.prefix.all()
    windows = windows_of(protocols.llama_cpp(4, bos="never"), 11)
    assert windows.start.tolist() == [0, 4]
    assert not windows.prefix.any()


def test_bos_follows_the_tokenizer():
    protocol = protocols.llama_cpp(4)
    assert protocol.for_tokenizer(adds_bos=True) == protocol
    assert protocol.prefix_rule == "bos"
    without = protocol.for_tokenizer(adds_bos=False)
    assert without.prefix_rule is None
    assert windows_of(without, 11).start.tolist() == [0, 4]
    assert (without.name, without.parameters) == (protocol.name, protocol.parameters)
    for bos, prefix in (("always", True), ("never", False)):
        fixed = protocols.llama_cpp(4, bos=bos).for_tokenizer(adds_bos=not prefix)
        assert windows_of(fixed, 11).prefix.all() == prefix


def test_published_window_count_of_wikitext2():
    assert protocols.llama_cpp().num_windows(np.array([335_688])).tolist() == [655]


def test_figures():
    sums = ScoredSums(
        nll_sum=6.0, nll_sq_sum=14.0, num_tokens=4, weighted_nll_sum=0.0, weight_sum=0, num_words=4
    )
    figures = protocols.llama_cpp(4).figures(sums)
    assert figures["perplexity_stderr_llama_cpp"] == pytest.approx(np.exp(1.5) * (1.25 / 3) ** 0.5)


def test_a_dropped_tail_is_noted():
    assert protocols.llama_cpp(4).notes(np.array([11]))[0].startswith("3 tokens after the last whole window")


def test_parameters_in_the_result():
    protocol = protocols.llama_cpp()
    assert (protocol.name, protocol.covers_text) == ("llama_cpp", False)
    assert protocol.parameters == {
        "max_seq_len": 512,
        "join": "",
        "bos": "tokenizer",
        "special_tokens": "text",
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: protocols.llama_cpp(2),
            "protocol.max_seq_len is 2; it must be a whole number of at least 3",
        ),
        (lambda: protocols.llama_cpp(8, bos="each_window"), "protocol.bos is 'each_window'; allowed: "),
    ],
)
def test_parameters_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
