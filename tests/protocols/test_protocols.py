"""Windows of every protocol: by hand, by property over random lengths, and against lm-eval itself."""

import json
import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ppl_eval import protocols
from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols.base import Protocol, ScoredSums, Windows
from ppl_eval.protocols.bos import check_bos_tokens, for_tokenizer, prefix_token
from ppl_eval.protocols.plan import make_plan
from ppl_eval.tokenization.encoders import Encoding
from ppl_eval.tokenization.tokenizer import TextEncoder

BOS, EOS = 1, 2
# A folder with window lists that lm-eval's own tests expect, where there is one.
GOLDEN = Path(os.environ.get("PPL_EVAL_GOLDENS", "goldens")) / "lmeval_rolling_windows_golden.json"


def windows_of(protocol: Protocol, *lengths: int) -> Windows:
    offsets = np.cumsum([0, *lengths])
    plan = make_plan(protocol, offsets, batch_size=4)
    return plan.windows(0, plan.num_windows)


def scored(protocol: Protocol, length: int) -> list[list[int]]:
    windows = windows_of(protocol, length)
    return [list(range(a, b)) for a, b in zip(windows.score_start, windows.stop, strict=True)]


def once(protocol: Protocol, length: int) -> list[int]:
    return list(chain.from_iterable(scored(protocol, length)))


def encoder(adds_bos: bool = False, bos_id: int | None = BOS, eos_id: int | None = EOS) -> TextEncoder:
    return TextEncoder(
        encoding=Encoding(lambda text: np.array([], dtype=np.int64)),
        decode=str,
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=adds_bos,
        vocab_size=100,
        sha256="",
    )


def token_data(*documents: list[int]) -> TokenData:
    none = np.zeros(len(documents), dtype=np.int64)
    return TokenData(
        tokens=np.concatenate([np.array(tokens, dtype=np.uint16) for tokens in documents]),
        offsets_D1=np.cumsum([0, *map(len, documents)]),
        num_bytes_D=none,
        num_words_D=none,
        num_documents=len(documents),
        fingerprint={},
    )


# --- by hand: a document of 11 tokens ---------------------------------------------------------------------

TOY = [
    (protocols.rolling(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    (protocols.strided(4, 2), [[1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]),
    (protocols.strided(4, 4), [[1, 2, 3], [5, 6, 7], [9, 10]]),
    (protocols.disjoint(4), [[1, 2, 3], [5, 6, 7]]),
    (protocols.disjoint(4, keep_tail=True), [[1, 2, 3], [5, 6, 7], [9, 10]]),
    (protocols.llama_cpp(4), [[3], [7]]),
    (protocols.megatron(4, 4), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
    (protocols.megatron(4, 2), [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]),
    (protocols.per_sample(10), [list(range(1, 11))]),
    (protocols.per_sample(4, too_long="truncate"), [[1, 2, 3, 4]]),
    (protocols.per_sample(4, too_long="window"), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
    (protocols.disjoint(4, bos="each_window"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (protocols.strided(4, 2, bos="each_window"), [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]),
    (protocols.rolling(4, bos="each_window"), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    (protocols.megatron(4, 2, bos="each_window"), [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10]]),
]


@pytest.mark.parametrize(("protocol", "expected"), TOY, ids=lambda x: getattr(x, "name", ""))
def test_scored_targets_of_eleven_tokens(protocol: Protocol, expected: list[list[int]]) -> None:
    assert scored(protocol, 11) == expected


def test_what_the_model_sees() -> None:
    assert windows_of(protocols.rolling(4), 11).start.tolist() == [0, 3, 6]
    assert windows_of(protocols.rolling(4), 11).prefix.tolist() == [True, False, False]
    assert windows_of(protocols.rolling(4, bos="each_window"), 11).start.tolist() == [0, 4, 7]
    assert windows_of(protocols.strided(4, 2), 11).start.tolist() == [0, 2, 4, 6, 8]
    assert windows_of(protocols.megatron(4, 2), 11).start.tolist() == [0, 2, 4, 6]
    # BOS stands in place of the first token of a chunk, or nothing does.
    assert windows_of(protocols.llama_cpp(4), 11).start.tolist() == [1, 5]
    assert windows_of(protocols.llama_cpp(4), 11).prefix.all()
    assert windows_of(protocols.llama_cpp(4, bos="never"), 11).start.tolist() == [0, 4]
    assert not windows_of(protocols.llama_cpp(4, bos="never"), 11).prefix.any()


def test_weights_of_the_documentation_script() -> None:
    for stride, weights in ((2, [3, 1, 1, 1, 0]), (4, [3, 3, 2])):
        protocol = protocols.strided(4, stride, weighting="hf_doc")
        assert protocol.window_weights is not None
        assert protocol.window_weights(windows_of(protocol, 11)).tolist() == weights


def test_published_window_counts_of_wikitext2() -> None:
    assert protocols.llama_cpp(512).num_windows(np.array([335_688])).tolist() == [655]
    assert protocols.disjoint(2048).num_windows(np.array([341_469])).tolist() == [166]


def test_figures() -> None:
    sums = ScoredSums(
        nll_sum=6.0, nll_sq_sum=14.0, num_tokens=4, weighted_nll_sum=3.0, weight_sum=2, num_words=4
    )
    hf_doc = protocols.strided(4, 2, weighting="hf_doc").figures
    llama_cpp, megatron = protocols.llama_cpp(4).figures, protocols.megatron(4).figures
    assert hf_doc
    assert llama_cpp
    assert megatron
    assert hf_doc(sums)["ce_loss"] == 1.5
    assert hf_doc(sums)["perplexity"] == pytest.approx(np.exp(1.5))
    assert llama_cpp(sums)["perplexity_stderr_llama_cpp"] == pytest.approx(np.exp(1.5) * (1.25 / 3) ** 0.5)
    assert megatron(sums)["adjusted_perplexity"] == pytest.approx(np.exp(2.0))
    assert megatron(sums._replace(nll_sum=1e6))["adjusted_perplexity"] == np.inf


# --- properties over random lengths -----------------------------------------------------------------------

BOS_ALL = st.sampled_from(["tokenizer", "always", "never", "each_window"])


@st.composite
def any_protocol(draw: st.DrawFn) -> Protocol:
    size = draw(st.integers(3, 12))
    inner = draw(st.integers(1, size))
    bos = draw(BOS_ALL)
    return draw(
        st.sampled_from(
            [
                protocols.disjoint(size, bos=bos),
                protocols.disjoint(size, keep_tail=True, bos=bos),
                protocols.strided(size, inner, bos=bos),
                protocols.rolling(size, inner, bos=bos),
                protocols.llama_cpp(size, bos="never" if bos == "each_window" else bos),
                protocols.megatron(size, inner, bos=bos),
                protocols.per_sample(size, too_long="truncate", bos=bos),
                protocols.per_sample(size, too_long="window", bos=bos),
            ]
        )
    )


@settings(max_examples=300, deadline=None)
@given(any_protocol(), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_windows_keep_the_promises_of_every_protocol(protocol: Protocol, lengths: list[int]) -> None:
    length_D = np.array(lengths)
    if not protocol.num_windows(length_D).any():
        return
    windows = windows_of(protocol, *lengths)
    inside = length_D[windows.document]
    assert (windows.num_inputs <= protocol.max_seq_len).all(), "the model sees too much"
    assert (windows.num_inputs >= 1).all()
    assert (windows.num_targets >= 1).all(), "a window that scores nothing"
    # No context and no target of another document, and no target without context.
    assert (windows.start >= 0).all()
    assert (windows.stop <= inside).all()
    assert (windows.score_start >= windows.start + 1 - windows.prefix).all()
    # The closed formula and the windows agree, per document, and nothing is scored twice.
    pairs = [
        (document, position)
        for document, first, stop in zip(windows.document, windows.score_start, windows.stop, strict=True)
        for position in range(first, stop)
    ]
    assert len(pairs) == len(set(pairs)), "a target scored twice"
    per_document = np.bincount([document for document, _ in pairs], minlength=len(lengths))
    assert per_document.tolist() == protocol.num_targets(length_D).tolist()
    # The model sees most where windows are full, but a document's first token needs a prefix to be scored.
    assert protocol.prefix_rule or not any(position == 0 for _, position in pairs)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.data(), st.integers(1, 80))
def test_each_token_once(size: int, data: st.DataObject, length: int) -> None:
    inner = data.draw(st.integers(1, size))
    everything = list(range(length))
    if length > 1:
        assert once(protocols.megatron(size, inner), length) == everything[1:]
        assert once(protocols.per_sample(size, too_long="window"), length) == everything[1:]
        if inner < size:
            assert once(protocols.strided(size, inner), length) == everything[1:]
    assert once(protocols.rolling(size, inner), length) == everything
    assert once(protocols.strided(size, inner, bos="each_window"), length) == everything
    assert once(protocols.disjoint(size, keep_tail=True, bos="each_window"), length) == everything


def test_windows_are_random_access() -> None:
    for protocol, _ in TOY[:9]:
        plan = make_plan(protocol, np.array([0, 11, 11, 22, 29]), batch_size=3)
        one_by_one = [plan.windows(i, i + 1) for i in range(plan.num_windows)]
        together = plan.windows(0, plan.num_windows)
        for name in Windows._fields:
            assert (
                np.concatenate([getattr(w, name) for w in one_by_one]).tolist()
                == getattr(together, name).tolist()
            )


# --- lm-eval's own windows --------------------------------------------------------------------------------


def lm_eval_windows(tokens: list[int], size: int, context_len: int) -> list[tuple[list[int], list[int]]]:
    return list(get_rolling_token_windows(tokens, -100, size, context_len))


def rolling_windows(tokens: list[int], size: int, context_len: int) -> list[tuple[list[int], list[int]]]:
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
def test_rolling_is_lm_evals_rolling(size: int, data: st.DataObject, length: int) -> None:
    context_len = data.draw(st.integers(1, size))
    tokens = list(range(1000, 1000 + length))
    theirs, ours = lm_eval_windows(tokens, size, context_len), rolling_windows(tokens, size, context_len)
    assert ours == theirs
    # What goes into the model: lm-eval joins the two halves of make_disjoint_window again.
    for (inputs, targets), pair in zip(ours, theirs, strict=True):
        context, continuation = make_disjoint_window(pair)
        assert [*inputs, targets[-1]] == context + continuation


def test_rolling_reproduces_lm_evals_goldens() -> None:
    # The cases of lm-eval's own test: 34 tokens, windows of 10, every kind of context length.
    for context_len in (1, 2, 5, 8, 9, 10):
        tokens = list(range(34))
        assert rolling_windows(tokens, 10, context_len) == lm_eval_windows(tokens, 10, context_len)
    if not GOLDEN.exists():
        pytest.skip("its cases ran live; PPL_EVAL_GOLDENS names no folder with the lists themselves")
    cases = json.loads(GOLDEN.read_text())
    assert cases
    for case in cases:
        ours = rolling_windows(list(range(case["n_tokens"])), case["max_seq_len"], case["context_len"])
        assert [list(pair) for pair in ours] == case["windows"], case["name"]


# --- bad parameters and BOS -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: protocols.strided(8, 0), "protocol.stride is 0; it must be a whole number from 1 to 8"),
        (lambda: protocols.strided(8, 9), "protocol.stride is 9"),
        (lambda: protocols.strided(8, 2.5), "protocol.stride is 2.5"),
        (lambda: protocols.strided(8, 2, weighting="mean"), "protocol.weighting is 'mean'; allowed: exact"),
        (lambda: protocols.strided(8, 2, weighting="hf_doc", bos="each_window"), "protocol.bos"),
        (lambda: protocols.rolling(8, 0), "protocol.context_len is 0"),
        (lambda: protocols.rolling(8, 9), "protocol.context_len is 9"),
        (lambda: protocols.rolling(0), "protocol.max_seq_len is 0"),
        (lambda: protocols.megatron(8, 0), "protocol.overlap_stride is 0"),
        (lambda: protocols.megatron(8, 9), "protocol.overlap_stride is 9"),
        (
            lambda: protocols.llama_cpp(2),
            "protocol.max_seq_len is 2; it must be a whole number of at least 3",
        ),
        (lambda: protocols.llama_cpp(8, bos="each_window"), "protocol.bos is 'each_window'"),
        (lambda: protocols.disjoint(1), "protocol.max_seq_len is 1"),
        (lambda: protocols.disjoint(True), "protocol.max_seq_len is True"),
        (lambda: protocols.disjoint("8"), "protocol.max_seq_len is '8'"),
        (lambda: protocols.disjoint(8, bos="yes"), "protocol.bos is 'yes'; allowed here: tokenizer, always"),
        (lambda: protocols.per_sample(8, too_long="cut"), "protocol.too_long is 'cut'; allowed: error"),
    ],
)
def test_parameters_out_of_range_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_sample_that_is_too_long_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"sample 1 has 12 tokens and needs 11 inputs.*2 of 3 samples.*too_long=truncate"
    ):
        windows_of(protocols.per_sample(8), 4, 12, 10)
    # Nine tokens are eight inputs.
    assert windows_of(protocols.per_sample(8), 9).num_inputs.tolist() == [8]


def test_what_is_dropped_or_cut_is_said() -> None:
    def notes(protocol: Protocol, *lengths: int) -> list[str]:
        assert protocol.notes is not None
        return protocol.notes(np.array(lengths))

    assert notes(protocols.disjoint(4), 11) == [
        "3 tokens after the last whole window are not scored, as in the protocol's reference"
    ]
    assert notes(protocols.disjoint(4), 12) == []
    assert protocols.disjoint(4, keep_tail=True).notes is None
    assert notes(protocols.llama_cpp(4), 11)[0].startswith("3 tokens")
    assert notes(protocols.per_sample(4, "truncate"), 5, 7) == [
        "1 of 2 samples are truncated: 2 targets are not scored (too_long=truncate)"
    ]
    assert notes(protocols.per_sample(4, "window"), 5, 7) == [
        "1 of 2 samples are cut into windows (too_long=window)"
    ]
    assert notes(protocols.per_sample(4), 5) == []


def test_llama_cpp_follows_the_tokenizer() -> None:
    protocol = protocols.llama_cpp(4)
    assert for_tokenizer(protocol, encoder(adds_bos=True)).prefix_rule == "bos"
    without = for_tokenizer(protocol, encoder(adds_bos=False))
    assert without.prefix_rule is None
    assert windows_of(without, 11).start.tolist() == [0, 4]
    for bos, prefix in (("always", True), ("never", False)):
        fixed = for_tokenizer(protocols.llama_cpp(4, bos=bos), encoder(adds_bos=not prefix))
        assert windows_of(fixed, 11).prefix.all() == prefix


def test_the_prefix_token() -> None:
    assert prefix_token(protocols.rolling(4), encoder()) == BOS
    assert prefix_token(protocols.rolling(4), encoder(bos_id=None)) == EOS
    assert prefix_token(protocols.disjoint(4), encoder()) is None
    assert prefix_token(protocols.disjoint(4, bos="each_window"), encoder()) == BOS
    with pytest.raises(ValueError, match="puts BOS or EOS before its windows, but this tokenizer has none"):
        prefix_token(protocols.rolling(4), encoder(bos_id=None, eos_id=None))
    with pytest.raises(ValueError, match="puts BOS before its windows"):
        prefix_token(protocols.disjoint(4, bos="each_window"), encoder(bos_id=None))


def test_each_window_leaves_bos_to_the_windows() -> None:
    assert encoder(adds_bos=True).bos_tokens("each_window") == []
    assert encoder(adds_bos=True).bos_tokens("tokenizer") == [BOS]


@pytest.mark.parametrize(
    ("protocol", "documents"),
    [
        # BOS in the tokens and again by the protocol; the empty document before it is no trouble.
        (protocols.rolling(4), [[7, 7], [], [BOS, 8, 9]]),
        (protocols.disjoint(4, bos="each_window"), [[7], [BOS, 8, 9, 10]]),
        # In the tokens twice: BOS in the text, and BOS by the tokenizer.
        (protocols.disjoint(4), [[7], [BOS, BOS, 8, 9]]),
    ],
)
def test_double_bos_is_refused(protocol: Protocol, documents: list[list[int]]) -> None:
    with pytest.raises(
        ValueError, match=rf"document {len(documents) - 1} would begin with BOS \(id 1\) twice"
    ):
        check_bos_tokens(protocol, token_data(*documents), encoder(adds_bos=True))


def test_one_bos_is_fine_and_none_is_said() -> None:
    model_with_bos = encoder(adds_bos=True)
    assert check_bos_tokens(protocols.disjoint(4), token_data([BOS, 8, 9]), model_with_bos) == []
    # llama.cpp's BOS takes the place of the one at the head.
    assert check_bos_tokens(protocols.llama_cpp(4), token_data([BOS, 8, 9, 10]), model_with_bos) == []
    assert check_bos_tokens(protocols.rolling(4), token_data([8, 9]), model_with_bos) == []
    # A document of one BOS, and the next begins with BOS too: not twice in one.
    assert check_bos_tokens(protocols.disjoint(4), token_data([BOS], [BOS, 9]), model_with_bos) == []
    notes = check_bos_tokens(protocols.disjoint(4, bos="never"), token_data([8, 9]), model_with_bos)
    assert len(notes) == 1
    assert "nothing here begins with it" in notes[0]
    assert "protocol.bos=tokenizer or each_window gives it BOS (now never)" in notes[0]
    # Tokens that were given without BOS, not made from text.
    notes = check_bos_tokens(protocols.disjoint(4), token_data([8, 9]), model_with_bos)
    assert "protocol.bos=each_window gives it BOS" in notes[0]
    assert check_bos_tokens(protocols.disjoint(4, bos="never"), token_data([8, 9]), encoder()) == []
