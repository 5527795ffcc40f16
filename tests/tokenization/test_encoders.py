"""Every kind of tokenizer that torchtune has a file format for gives the ids of its own call."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from helpers.chunks import in_chunks
from helpers.texts import corpus, nasty_text
from helpers.tiny_tokenizers import hard_bpe, llama3_tokenizer, sentencepiece_model, train_bpe, write_folder
from ppl_eval.tokenization import chunking
from ppl_eval.tokenization.cuttable import why_one_call
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


QUOTES = '"[^"]*"|[^"]+'
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def splitting(*splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE behind these steps."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return train_bpe(tokenizer, corpus(), 700, ["<s>", "<|endoftext|>"])


def split(regex: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), behavior, invert)


def reason_of(tokenizer: Tokenizer) -> str | None:
    return why_one_call(json.loads(tokenizer.to_str()))


def test_an_expression_with_memory_is_not_cut(tmp_path: Path) -> None:
    config = write_folder(splitting(split(QUOTES)), tmp_path, "<|endoftext|>")
    encoding = encoding_of(HuggingFaceBaseTokenizer(**config), config)
    assert str(encoding.one_call).startswith("matches of its pre-tokenizer's Split")
    # Quotes every few words: cut at 1,000 characters, inside and outside would be taken for each other.
    text = ('the cat "sat on the mat, " and the "dog ran" there. ' * 200)[7:]
    ids, num_chunks = in_chunks(encoding, text, 1000)
    assert num_chunks == 1
    np.testing.assert_array_equal(ids, encoding.encode(text))


@pytest.mark.parametrize("behavior", ["isolated", "removed", "merged_with_previous", "contiguous"])
@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize(
    "regex",
    [
        QUOTES,
        r"\S+\s*$",
        r"(?<=a)b",
        r"^.+",
        "ab|b[ab]+",
        ".*?;",
        "aa",
        r"\bthe\b",
        "[[^a]b]+",
        r"[a&&b]+",
        GPT2 + "|x.*y",
    ],
)
def test_every_expression_that_is_not_known_is_not_cut(regex: str, behavior: str, invert: bool) -> None:
    step = split(regex, behavior, invert)
    for steps in ([step], [split(r"\s+"), step], [pre_tokenizers.Sequence([step]), split(" ")]):
        reason = reason_of(splitting_untrained(*steps))
        assert reason is not None
        assert regex in reason.replace("\\\\", "\\")


def splitting_untrained(*splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splits))
    return tokenizer


def published() -> dict[str, list[str]]:
    """The expressions as the libraries have them, in the places where they stand."""
    from torchtune.models.llama3._tokenizer import CL100K_PATTERN
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

    deepseek = (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )
    return {
        "gpt2": [GPT2],
        "llama3": [CL100K_PATTERN],
        "qwen2": [QWEN2],
        "qwen3.5": [QWEN35],
        "deepseek": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", deepseek],
        "digits": [r"\d{1,3}", r"[\r\n]", r"\s?\p{L}+"],
    }


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "qwen3.5", "deepseek", "digits", "o200k"])
def test_published_expressions_are_cut_and_give_the_ids_of_one_call(name: str, tmp_path: Path) -> None:
    expressions = [o200k()] if name == "o200k" else published()[name]
    tokenizer = splitting(*map(split, expressions))
    assert reason_of(tokenizer) is None
    removed = splitting_untrained(split(expressions[-1], "removed", True))
    assert reason_of(removed) is None
    config = write_folder(tokenizer, tmp_path, "<|endoftext|>")
    encoding = encoding_of(HuggingFaceBaseTokenizer(**config), config)
    num_chunks = 0
    for seed in range(4):
        text = nasty_text(seed)
        ids, taken = in_chunks(encoding, text, 300)
        np.testing.assert_array_equal(ids, encoding.encode(text))
        num_chunks += taken
    assert num_chunks > 8


def o200k() -> str:
    """GPT-4o's expression, out of tiktoken's own module."""
    from tiktoken_ext import openai_public

    (parts,) = re.findall(
        r"pat_str = \"\|\".join\(\s*\[(.*?)\]\s*\)\n", Path(openai_public.__file__).read_text(), re.S
    )
    return "|".join(re.findall(r'r"""(.*?)"""', parts))


def test_published_expressions_whose_matches_are_merged_are_not_cut() -> None:
    for behavior in ("merged_with_previous", "merged_with_next", "contiguous", "removed"):
        assert reason_of(splitting_untrained(split(GPT2, behavior))) is not None


def test_steps_of_one_class_are_cut_and_replacements_are_looked_at() -> None:
    for behavior in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            assert reason_of(splitting_untrained(pre_tokenizers.Split(" ", behavior, invert))) is None
    replacing = splitting_untrained(split(" "))
    replacing.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    assert reason_of(replacing) is None
    replacing.normalizer = normalizers.Sequence([normalizers.Replace(Regex('"[^"]*"'), "")])
    assert "normalizer's Replace" in str(reason_of(replacing))


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
    from torchtune.models.llama2 import Llama2Tokenizer

    tokenizer = Llama2Tokenizer(str(sentencepiece_model(tmp_path, model_type)))
    # torchtune's own call spells special tokens.
    encoding = encoding_of(tokenizer, {}, "text")
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
