"""Tokenising in chunks gives the ids of one call, on nasty texts and with every way to split them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.chunks import in_chunks
from helpers.texts import FRAGMENTS, nasty_text
from helpers.tiny_tokenizers import hard_bpe, hf_encoding
from ppl_eval.tokenization import chunking
from ppl_eval.tokenization.encoders import Encoding, encode_hf

HF_KINDS = ("byte_level", "byte_level_prefix_space", "split_digits_in_threes", "no_pre_tokenizer")


@pytest.fixture(scope="module", params=HF_KINDS)
def encoding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return hf_encoding(request.param, tmp_path_factory.mktemp("tokenizer"))


def test_chunks_equal_one_call_on_nasty_texts(encoding: Encoding) -> None:
    assert encoding.one_call is None
    taken = 0
    for seed in range(12):
        text = nasty_text(seed)
        for chunk_chars in (50, 333):
            ids, num_chunks = in_chunks(encoding, text, chunk_chars)
            np.testing.assert_array_equal(ids, encoding.encode(text))
            taken += num_chunks
    # Most texts are really cut, or the test would prove nothing.
    assert taken > 100


@settings(max_examples=40, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=300), chunk_chars=st.integers(20, 300)
)
def test_chunks_equal_one_call_on_drawn_texts(fragments: list[str], chunk_chars: int) -> None:
    text = "".join(fragments)
    for drawn in _drawn_encodings():
        ids, _ = in_chunks(drawn, text, chunk_chars)
        np.testing.assert_array_equal(ids, drawn.encode(text))


_made: list[Encoding] = []


def _drawn_encodings() -> list[Encoding]:
    if not _made:
        _made.extend(Encoding(partial(encode_hf, hard_bpe(kind), False)) for kind in HF_KINDS)
    return _made


@pytest.mark.parametrize("run", ["a", " ", "1", "\n", "ab", "中", "😀", "\u200b"])
def test_a_text_of_one_run_is_right_however_it_is_cut(encoding: Encoding, run: str) -> None:
    text = f"The cat{run * 3001} sat.\n" + "on the mat\n" * 30
    ids, _ = in_chunks(encoding, text, 100)
    np.testing.assert_array_equal(ids, encoding.encode(text))


def test_a_line_without_end_is_cut_inside_words(tmp_path: Path) -> None:
    encoding = hf_encoding("byte_level", tmp_path)
    text = "中文分词没有空格日本語" * 2000
    ids, num_chunks = in_chunks(encoding, text, 2000)
    np.testing.assert_array_equal(ids, encoding.encode(text))
    assert num_chunks > 5


def test_streams_may_come_mixed(encoding: Encoding) -> None:
    texts = [nasty_text(50), nasty_text(51)]
    parts = [
        (s, texts[s][i : i + 90], i + 90 >= len(texts[s]))
        for i in range(0, 9000, 90)
        for s in (1, 0)
        if i < len(texts[s])
    ]
    made = chunking.checked(chunking.encode_chunks(encoding.encode, list(chunking.cut(parts, encoding, 200))))
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in made:
        ids[chunk.stream] += chunk.ids.tolist()
    for stream, text in enumerate(texts):
        assert ids[stream] == encoding.encode(text).tolist()


def test_a_bad_seam_is_found() -> None:
    # Digits in threes counted from the head: a cut that ignores the phase is seen on both sides.
    def encode(text: str) -> np.ndarray:
        return np.array([int(text[i : i + 3]) for i in range(0, len(text), 3)], dtype=np.int64)

    good = [chunking.Chunk(0, "123456", "", True, False), chunking.Chunk(0, "789", "456", False, True)]
    assert [list(p.ids) for p in chunking.checked(chunking.encode_chunks(encode, good))] == [
        [123, 456],
        [789],
    ]
    with pytest.raises(chunking.SeamError):
        chunking.encode_chunks(encode, [chunking.Chunk(0, "789", "45", False, True)])
    wrong_tail = [chunking.Chunk(0, "1234567", "", True, False), chunking.Chunk(0, "789", "567", False, True)]
    with pytest.raises(chunking.SeamError):
        list(chunking.checked(chunking.encode_chunks(encode, wrong_tail)))
