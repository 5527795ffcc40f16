"""Every kind of tokenizer that torchtune has a file format for gives the ids of its own call."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from helpers.chunks import in_chunks
from helpers.texts import corpus, nasty_text
from helpers.tiny_tokenizers import hard_bpe, llama3_tokenizer, write_folder
from ppl_eval.tokenization import chunking
from ppl_eval.tokenization.encoders import encoding_of


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
        config = write_folder(tokenizer, tmp_path, "<|endoftext|>")
        encoding = encoding_of(HuggingFaceBaseTokenizer(**config), config)
        assert word in str(encoding.one_call)
        assert len(list(chunking.cut([(0, "ab" * 5000, True)], encoding, 100))) == 1


def test_a_length_limit_inside_tokenizer_json_drops_nothing(tmp_path: Path) -> None:
    tokenizer = hard_bpe("byte_level")
    tokenizer.enable_truncation(5)
    config = write_folder(tokenizer, tmp_path, "<|endoftext|>")
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
        ids, num_chunks = in_chunks(encoding, text, 10**9)
        np.testing.assert_array_equal(ids, whole)
        assert num_chunks == -(-len(text) // 500)


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
        ids, num_chunks = in_chunks(encoding, text, 120)
        np.testing.assert_array_equal(ids, tokenizer.encode(text, add_bos=False, add_eos=False))
        taken += num_chunks
    assert taken > 30 if model_type == "bpe" else taken == 8


def test_qwen2_is_rebuilt_in_workers_from_its_config(tmp_path: Path) -> None:
    import pickle

    tokenizer = hard_bpe("byte_level")
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
        np.testing.assert_array_equal(in_chunks(encoding, text, 200)[0], encode(text))
