"""Bytes and words are counted as the reference tools count them, however a text comes in parts."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from helpers.texts import FRAGMENTS
from ppl_eval.tokenization.word_count import TextCounter, count_words


@given(
    fragments=st.lists(st.sampled_from([*FRAGMENTS, "\x1c", "\x85", "\u2003", "é"])),
    cuts=st.lists(st.integers(0, 5000)),
    repeats=st.sampled_from([1, 40]),
)
def test_words_and_bytes_are_counted_as_the_references_do(
    fragments: list[str], cuts: list[int], repeats: int
) -> None:
    # Short texts and long ones are counted in two ways.
    text = "".join(fragments) * repeats
    expected = {"white_space": len(re.split(r"\s+", text)), "space": len(text.strip().split(" "))}
    for separator, num_words in expected.items():
        counter = TextCounter(separator)
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        for start, stop in pairwise(edges):
            counter.add(text[start:stop])
        size = counter.size()
        assert (size.num_bytes, size.num_words) == (len(text.encode()), num_words)
        assert size.has_crlf == ("\r\n" in text)
    assert count_words(text) == expected["white_space"]
