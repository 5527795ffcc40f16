"""Rolling windows: by hand, and against lm-eval's own window functions over random lengths."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from helpers.windows import scored, windows_of
from ppl_eval import protocols

# A folder with window lists that lm-eval's own tests expect, where there is one.
GOLDEN = Path(os.environ.get("PPL_EVAL_GOLDENS", "goldens")) / "lmeval_rolling_windows_golden.json"
Pairs = list[tuple[list[int], list[int]]]


@pytest.mark.parametrize("bos", ["never", "each_window"])
def test_scored_targets_of_eleven_tokens(bos):
    assert scored(protocols.rolling(4, bos=bos), 11) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_what_the_model_sees():
    windows = windows_of(protocols.rolling(4), 11)
    assert windows.start.tolist() == [0, 3, 6]
    assert windows.prefix.tolist() == [True, False, False]
    windows = windows_of(protocols.rolling(4, bos="each_window"), 11)
    assert windows.start.tolist() == [0, 4, 7]
    assert windows.prefix.all()


def theirs(tokens: list[int], size: int, context_len: int) -> Pairs:
    return list(get_rolling_token_windows(tokens, -100, size, context_len))


def ours(tokens: list[int], size: int, context_len: int) -> Pairs:
    pairs = []
    protocol, length = protocols.rolling(size, context_len), np.array([len(tokens)])
    index = np.arange(protocol.num_windows(length)[0])
    columns = protocol.locate(np.repeat(length, len(index)), index)
    for start, score_start, stop, prefix in zip(*columns, strict=True):
        sequence = [-100] * int(prefix) + tokens[start:stop]
        pairs.append((sequence[:-1], tokens[score_start:stop]))
    return pairs


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 16), st.data(), st.integers(0, 120))
def test_windows_are_those_of_lm_eval(size: int, data: st.DataObject, length: int):
    context_len = data.draw(st.integers(1, size))
    tokens = list(range(1000, 1000 + length))
    expected, found = theirs(tokens, size, context_len), ours(tokens, size, context_len)
    assert found == expected
    # What goes into the model: lm-eval joins the two halves of make_disjoint_window again.
    for (inputs, targets), pair in zip(found, expected, strict=True):
        context, continuation = make_disjoint_window(pair)
        assert [*inputs, targets[-1]] == context + continuation


def test_goldens_of_lm_eval():
    # The cases of lm-eval's own test: 34 tokens, windows of 10, every kind of context length.
    for context_len in (1, 2, 5, 8, 9, 10):
        tokens = list(range(34))
        assert ours(tokens, 10, context_len) == theirs(tokens, 10, context_len)
    if not GOLDEN.exists():
        pytest.skip("its cases ran live; PPL_EVAL_GOLDENS names no folder with the lists themselves")
    cases = json.loads(GOLDEN.read_text())
    assert cases
    for case in cases:
        found = ours(list(range(case["n_tokens"])), case["max_seq_len"], case["context_len"])
        assert [list(pair) for pair in found] == case["windows"], case["name"]


def test_parameters_in_the_result():
    protocol = protocols.rolling(4)
    assert (protocol.name, protocol.join, protocol.prefix_rule) == ("rolling", None, "bos_or_eos")
    assert protocol.parameters == {
        "max_seq_len": 4,
        "context_len": 1,
        "bos": "never",
        "special_tokens": "parse",
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: protocols.rolling(8, 0), "protocol.context_len is 0; it must be a whole number from 1 to 8"),
        (lambda: protocols.rolling(8, 9), "protocol.context_len is 9"),
        (lambda: protocols.rolling(0), "protocol.max_seq_len is 0; it must be a whole number of at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
