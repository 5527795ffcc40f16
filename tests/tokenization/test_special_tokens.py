"""Names of special tokens in a text: parsed or spelled, by every class of tokenizer alike."""

import json
import pickle
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from torchtune.models.llama2 import Llama2Tokenizer
from torchtune.models.phi3 import Phi3MiniTokenizer
from torchtune.models.phi4._tokenizer import Phi4Tokenizer

from helpers.chunks import in_chunks
from helpers.sources import listed, tokens_of
from helpers.texts import nasty_text
from helpers.tiny_tokenizers import (
    hard_bpe,
    llama3_tokenizer,
    qwen2_tokenizer,
    sentencepiece_model,
    write_folder,
)
from ppl_eval import protocols
from ppl_eval.tokenization.text_spans import token_bytes
from ppl_eval.tokenization.tokenizer import wrap_tokenizer


def hugging_face(folder: Path) -> tuple[Any, int, str]:
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    tokenizer = hard_bpe("byte_level")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    section = write_folder(tokenizer, folder, "<|endoftext|>")
    return HuggingFaceBaseTokenizer(**section), tokenizer.token_to_id("<|im_end|>"), "<|im_end|>"


def phi4(folder: Path) -> tuple[Any, int, str]:
    qwen2_tokenizer(folder)
    merges = "#version: 0.2\nt h\n"
    (folder / "merges.txt").write_text(merges)
    paths = {"vocab_path": str(folder / "vocab.json"), "merges_path": str(folder / "merges.txt")}
    return Phi4Tokenizer(**paths), 100_265, "<|im_end|>"


MADE: dict[str, Callable[[Path], tuple[Any, int, str]]] = {
    "hugging_face": hugging_face,
    "llama3": lambda folder: (llama3_tokenizer(folder), 128_009, "<|eot_id|>"),
    "qwen2": lambda folder: (qwen2_tokenizer(folder), 259, "<|im_end|>"),
    "phi4": phi4,
    "llama2": lambda folder: (Llama2Tokenizer(str(sentencepiece_model(folder))), 2, "</s>"),
    "phi3": lambda folder: (Phi3MiniTokenizer(str(sentencepiece_model(folder))), 32_007, "<|end|>"),
}


# From their config section, which is not at hand here.
BUILT_IN_WORKERS = ("qwen2", "phi4")


@pytest.mark.parametrize("kind", sorted(MADE))
def test_every_class_parses_or_spells(tmp_path: Path, kind: str) -> None:
    tokenizer, special_id, name = MADE[kind](tmp_path)
    parse, spell = (wrap_tokenizer(tokenizer, {}, what) for what in ("parse", "text"))
    text = f"the cat{name} sat.{name}{name}\nEnd"
    for _ in range(2):
        # In turns: neither changes what the other does. And as a worker has it.
        for encoder, expected in ((parse, 3), (spell, 0)):
            encode = encoder.encoding.encode
            if kind not in BUILT_IN_WORKERS:
                encode = pickle.loads(pickle.dumps(encode))
            for ids in (encode(text), encoder.encode(text)):
                assert int(np.count_nonzero(ids == special_id)) == expected
    assert len(parse.encode(text)) < len(spell.encode(text))
    for plain in ("the cat", "", "a <| b"):
        np.testing.assert_array_equal(parse.encode(plain), spell.encode(plain))


@pytest.mark.parametrize("special_tokens", ["parse", "text"])
@pytest.mark.parametrize("kind", sorted(set(MADE) - {"phi4"}))
def test_chunks_and_bytes_add_up(tmp_path: Path, kind: str, special_tokens: str) -> None:
    tokenizer, _, name = MADE[kind](tmp_path)
    encoder = wrap_tokenizer(tokenizer, {}, special_tokens)
    assert encoder.encoding.spans is not None
    spans = pickle.loads(pickle.dumps(encoder.encoding.spans()))
    for seed in range(4):
        # Qwen2's class normalises, and then cannot say which bytes a token had.
        nasty = unicodedata.normalize("NFC", nasty_text(seed))
        text = name.join(nasty[i : i + 37] for i in range(0, 400, 37))
        ids = encoder.encode(text)
        np.testing.assert_array_equal(in_chunks(encoder.encoding, text, 150)[0], ids)
        num_bytes = token_bytes(spans, ids, "", text, 0)
        assert num_bytes is not None
        assert int(num_bytes.sum()) == len(text.encode())
        if special_tokens == "parse":
            at = np.flatnonzero(ids == encoder.encode(name)[-1])
            assert (num_bytes[at] == len(name)).all()


def test_spelled_as_transformers_spells_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer, _, name = hugging_face(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = f"the {name} of</s>\n{name}"
    for special_tokens, split in (("parse", False), ("text", True)):
        encoder = wrap_tokenizer(tokenizer, {}, special_tokens)
        expected = theirs(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
        assert encoder.encode(text).tolist() == expected


def test_classes_agree(tmp_path: Path) -> None:
    """The same vocabulary as tokenizer.json and in Qwen2's class."""
    qwen = qwen2_tokenizer(tmp_path / "qwen")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = json.loads((tmp_path / "qwen" / "vocab.json").read_text())
    same = Tokenizer(models.BPE(vocab, [("t", "h")]))
    same.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    same.decoder = decoders.ByteLevel()
    same.add_special_tokens([AddedToken(name, normalized=False) for name in qwen.special_tokens])
    section = write_folder(same, tmp_path, "<|im_end|>") | {}
    about = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nthat<|im_end|>\n" * 3
    counts = []
    for special_tokens in ("parse", "text"):
        found = [
            wrap_tokenizer(tokenizer, {}, special_tokens).encode(text).tolist()
            for tokenizer in (qwen, HuggingFaceBaseTokenizer(**section))
        ]
        assert found[0] == found[1]
        counts.append(len(found[0]))
    assert counts[1] - counts[0] == 6 * len("<|im_start|>") + 6 * len("<|im_end|>") - 12


def test_protocols_state_their_references_choice(tmp_path: Path) -> None:
    assert protocols.llama_cpp().special_tokens == "text"
    assert protocols.llama_cpp(bos="tokenizer").for_tokenizer(False).parameters["special_tokens"] == "text"
    for protocol in (
        protocols.disjoint(8),
        protocols.strided(8, 4),
        protocols.rolling(8),
        protocols.megatron(8, 4),
        protocols.per_sample(8),
    ):
        assert protocol.parameters["special_tokens"] == "parse"
    with pytest.raises(ValueError, match=r"protocol.special_tokens is 'maybe'; allowed: parse, text"):
        protocols.disjoint(8, special_tokens="maybe")


def test_the_cache_keeps_them_apart(tmp_path: Path) -> None:
    tokenizer, _, name = hugging_face(tmp_path)
    encoders = [wrap_tokenizer(tokenizer, {}, what) for what in ("parse", "text", "parse")]
    found = [tokens_of(listed([f"the cat{name}"]), encoder, tmp_path / "cache") for encoder in encoders]
    assert found[0].tokens.tolist() == found[2].tokens.tolist() != found[1].tokens.tolist()
    assert [data.fingerprint["special_tokens"] for data in found] == ["parse", "text", "parse"]


def test_a_class_that_cannot_spell_them_is_refused(tmp_path: Path) -> None:
    class Own:
        bos_id = eos_id = None
        vocab_size = 300

        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode()

    assert wrap_tokenizer(Own(), {}).encode("a<s>").tolist() == list(b"a<s>")
    with pytest.raises(ValueError, match="special_tokens is 'text', but what Own does"):
        wrap_tokenizer(Own(), {}, "text")
