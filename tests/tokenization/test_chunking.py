"""Tokenising in pieces gives the ids of one call: on nasty texts, with every tokenizer that torchtune has a
file format for.
"""

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from helpers.data_helpers import (
    FRAGMENTS,
    corpus,
    hf_config,
    hf_encoding,
    llama3_tokenizer,
    nasty_text,
    train,
)
from ppl_eval.tokenization import chunking as pieces
from ppl_eval.tokenization import workers
from ppl_eval.tokenization.encoders import Encoding, encoding_of

HF_KINDS = ("byte_level", "byte_level_prefix_space", "split_digits_in_threes", "no_pre_tokenizer")


@pytest.fixture(scope="module", params=HF_KINDS)
def encoding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return hf_encoding(request.param, tmp_path_factory.mktemp("tokenizer"))


def in_pieces(
    encoding: Encoding, text: str, piece_chars: int, part_chars: int = 97
) -> tuple[np.ndarray, int]:
    """Ids of the text in pieces, and how many pieces it took."""
    starts = range(0, len(text), part_chars)
    parts = [(0, text[i : i + part_chars], i + part_chars >= len(text)) for i in starts]
    made = list(pieces.cut(parts, encoding, piece_chars))
    assert "".join(piece.text for piece in made) == text
    encoded = list(pieces.checked(pieces.encode_pieces(encoding.encode, made)))
    return np.concatenate([piece.ids for piece in encoded]), len(made)


def test_pieces_equal_one_call_on_nasty_texts(encoding: Encoding) -> None:
    assert encoding.one_call is None
    taken = 0
    for seed in range(12):
        text = nasty_text(seed)
        for piece_chars in (50, 333):
            ids, num_pieces = in_pieces(encoding, text, piece_chars)
            np.testing.assert_array_equal(ids, encoding.encode(text))
            taken += num_pieces
    # Most texts are really cut, or the test would prove nothing.
    assert taken > 100


@settings(max_examples=40, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=300), piece_chars=st.integers(20, 300)
)
def test_pieces_equal_one_call_on_drawn_texts(fragments: list[str], piece_chars: int) -> None:
    text = "".join(fragments)
    for drawn in _drawn_encodings():
        ids, _ = in_pieces(drawn, text, piece_chars)
        np.testing.assert_array_equal(ids, drawn.encode(text))


_made: list[Encoding] = []


def _drawn_encodings() -> list[Encoding]:
    if not _made:
        from functools import partial

        from ppl_eval.tokenization.encoders import encode_hf

        _made.extend(Encoding(partial(encode_hf, train(kind))) for kind in HF_KINDS)
    return _made


@pytest.mark.parametrize("run", ["a", " ", "1", "\n", "ab", "中", "😀", "\u200b"])
def test_a_text_of_one_run_is_right_however_it_is_cut(encoding: Encoding, run: str) -> None:
    text = f"The cat{run * 3001} sat.\n" + "on the mat\n" * 30
    ids, _ = in_pieces(encoding, text, 100)
    np.testing.assert_array_equal(ids, encoding.encode(text))


def test_a_line_without_end_is_cut_inside_words(tmp_path: Path) -> None:
    encoding = hf_encoding("byte_level", tmp_path)
    text = "中文分词没有空格日本語" * 2000
    ids, num_pieces = in_pieces(encoding, text, 2000)
    np.testing.assert_array_equal(ids, encoding.encode(text))
    assert num_pieces > 5


def test_streams_may_come_mixed(encoding: Encoding) -> None:
    texts = [nasty_text(50), nasty_text(51)]
    parts = [
        (s, texts[s][i : i + 90], i + 90 >= len(texts[s]))
        for i in range(0, 9000, 90)
        for s in (1, 0)
        if i < len(texts[s])
    ]
    made = pieces.checked(pieces.encode_pieces(encoding.encode, list(pieces.cut(parts, encoding, 200))))
    ids: dict[int, list[int]] = {0: [], 1: []}
    for piece in made:
        ids[piece.stream] += piece.ids.tolist()
    for stream, text in enumerate(texts):
        assert ids[stream] == encoding.encode(text).tolist()


def test_a_bad_seam_is_found() -> None:
    # Digits in threes counted from the head: a cut that ignores the phase is seen on both sides.
    def encode(text: str) -> np.ndarray:
        return np.array([int(text[i : i + 3]) for i in range(0, len(text), 3)], dtype=np.int64)

    good = [pieces.Piece(0, "123456", "", True, False), pieces.Piece(0, "789", "456", False, True)]
    assert [list(p.ids) for p in pieces.checked(pieces.encode_pieces(encode, good))] == [[123, 456], [789]]
    with pytest.raises(pieces.SeamError):
        pieces.encode_pieces(encode, [pieces.Piece(0, "789", "45", False, True)])
    wrong_tail = [pieces.Piece(0, "1234567", "", True, False), pieces.Piece(0, "789", "567", False, True)]
    with pytest.raises(pieces.SeamError):
        list(pieces.checked(pieces.encode_pieces(encode, wrong_tail)))


def test_encoders_that_weigh_the_whole_text_are_not_cut(tmp_path: Path) -> None:
    unigram = Tokenizer(
        models.Unigram(
            [("<s>", 0.0), ("<|endoftext|>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -2.5)], 0, False
        )
    )
    dropout = Tokenizer(models.BPE({"<s>": 0, "<|endoftext|>": 1, "a": 2}, [], dropout=0.1))
    counting = Tokenizer(models.BPE({"<s>": 0, "<|endoftext|>": 1, "a": 2}, []))
    counting.pre_tokenizer = pre_tokenizers.FixedLength(length=3)
    for tokenizer, word in ((unigram, "unigram"), (dropout, "random"), (counting, "FixedLength")):
        config = hf_config(tokenizer, tmp_path)
        encoding = encoding_of(HuggingFaceBaseTokenizer(**config), config)
        assert word in str(encoding.one_call)
        assert len(list(pieces.cut([(0, "ab" * 5000, True)], encoding, 100))) == 1


def test_a_length_limit_inside_tokenizer_json_drops_nothing(tmp_path: Path) -> None:
    tokenizer = train("byte_level")
    tokenizer.enable_truncation(5)
    config = hf_config(tokenizer, tmp_path)
    assert len(encoding_of(HuggingFaceBaseTokenizer(**config), config).encode("the cat " * 50)) > 50


def test_llama3_parts_are_those_of_torchtune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtune.modules.transforms.tokenizers import _tiktoken

    monkeypatch.setattr(_tiktoken, "MAX_ENCODE_CHARS", 500)
    monkeypatch.setattr(_tiktoken, "MAX_NO_WHITESPACE_CHARS", 20)
    tokenizer = llama3_tokenizer(tmp_path)
    encoding = encoding_of(tokenizer, {})
    assert encoding.cut_every == 500
    for seed in range(6):
        text = nasty_text(seed)
        whole = tokenizer.encode(text, add_bos=False, add_eos=False)
        np.testing.assert_array_equal(encoding.encode(text), whole)
        ids, num_pieces = in_pieces(encoding, text, 10**9)
        np.testing.assert_array_equal(ids, whole)
        assert num_pieces == -(-len(text) // 500)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_sentencepiece(tmp_path: Path, model_type: str) -> None:
    import sentencepiece
    from torchtune.models.llama2 import Llama2Tokenizer

    (tmp_path / "corpus.txt").write_text("".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=900,
        model_type=model_type,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = Llama2Tokenizer(str(tmp_path / "tokenizer.model"))
    encoding = encoding_of(tokenizer, {})
    assert (encoding.one_call is None) == (model_type == "bpe")
    taken = 0
    for seed in range(8):
        text = nasty_text(seed)
        ids, num_pieces = in_pieces(encoding, text, 120)
        np.testing.assert_array_equal(ids, tokenizer.encode(text, add_bos=False, add_eos=False))
        taken += num_pieces
    assert taken > 30 if model_type == "bpe" else taken == 8


def test_qwen2_is_rebuilt_in_workers_from_its_config(tmp_path: Path) -> None:
    import pickle

    tokenizer = train("byte_level")
    model = json.loads(tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    config = {
        "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
        "path": str(tmp_path / "vocab.json"),
        "merges_file": str(tmp_path / "merges.txt"),
    }
    qwen = instantiate(OmegaConf.create(config))
    encoding = encoding_of(qwen, config)
    encode = pickle.loads(pickle.dumps(encoding.encode))
    for seed in range(4):
        text = nasty_text(seed)
        np.testing.assert_array_equal(encode(text), qwen.encode(text, add_bos=False, add_eos=False))
        np.testing.assert_array_equal(in_pieces(encoding, text, 200)[0], encode(text))


def children() -> set[psutil.Process]:
    # Other tests may have left a fork server, which waits for the next one that wants it.
    return set(psutil.Process(os.getpid()).children())


def test_workers_give_the_same_ids_in_order_and_go_away(tmp_path: Path) -> None:
    encoding = hf_encoding("byte_level", tmp_path)
    text = "".join(nasty_text(seed) for seed in range(5))
    groups = list(pieces.group(pieces.cut([(0, text, True)], encoding, 300), 300))
    assert len(groups) > 10
    others = children()
    encoded = workers.encode_groups(encoding.encode, groups, num_workers=2)
    begun = [next(encoded)]
    begotten = children() - others
    assert len(begotten) == 2
    ids = np.concatenate([piece.ids for piece in pieces.checked([*begun, *encoded])])
    np.testing.assert_array_equal(ids, encoding.encode(text))
    assert not any(child.is_running() for child in begotten)


def test_a_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    others = children()
    encoding = hf_encoding("byte_level", tmp_path)
    groups = list(pieces.group(pieces.cut([(0, nasty_text(1, 4000), True)], encoding, 300), 300))
    encoded = workers.encode_groups(encoding.encode, groups, num_workers=2)
    next(encoded)
    for child in children() - others:
        child.kill()
    with pytest.raises(RuntimeError, match="exit code -9"):
        list(encoded)
