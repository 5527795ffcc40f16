"""Tiny tokenizers of every kind: trained on the spot, as objects, as folders, and as the recipe sees them."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.qwen2 import Qwen2Tokenizer
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer
from transformers import PreTrainedTokenizerFast

from helpers.texts import corpus
from ppl_eval.tokenization.encoders import Encoding, encoding_of
from ppl_eval.tokenization.tokenizer import TextEncoder, wrap_tokenizer

TINY_VOCAB_SIZE = 300
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(
    tokenizer: Tokenizer, texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]
) -> Tokenizer:
    """Train a tokenizer whose model is BPE; the special tokens get the first ids."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level_bpe(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on a text, with BOS 0 and EOS 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return train_bpe(tokenizer, [text], vocab_size, ["<s>", "</s>"])


def hard_bpe(kind: str) -> Tokenizer:
    """A BPE of 700 tokens trained on ``texts.corpus``, with BOS 0 and EOS 1; ``kind`` says how it splits."""
    if kind == "byte_level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "byte_level_prefix_space":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "split_digits_in_threes":
        tokenizer = Tokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(pattern=Regex(LLAMA3_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        # As converted Llama-2 tokenizers: no pre-tokenizer at all, merges run over the whole text.
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=False))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return train_bpe(tokenizer, corpus(), 700, ["<s>", "<|endoftext|>", "<unk>"])


def write_folder(tokenizer: Tokenizer, folder: Path, eos_token: str) -> dict[str, str]:
    """Write a tokenizer as a Hugging Face style folder has it; returns the config section that reads it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": eos_token,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return {
        "tokenizer_json_path": str(folder / "tokenizer.json"),
        "tokenizer_config_json_path": str(folder / "tokenizer_config.json"),
    }


def hf_encoding(kind: str, folder: Path) -> Encoding:
    config = write_folder(hard_bpe(kind), folder, "<|endoftext|>")
    return encoding_of(HuggingFaceBaseTokenizer(**config), config)


def hf_encoder(folder: Path, kind: str = "byte_level") -> TextEncoder:
    return wrapped(hard_bpe(kind), folder, "<|endoftext|>")


def wrapped(tokenizer: Tokenizer, folder: Path, eos_token: str = "</s>") -> TextEncoder:
    """A tokenizer as the recipe reads it from a folder."""
    folder.mkdir(exist_ok=True)
    config = write_folder(tokenizer, folder, eos_token)
    return wrap_tokenizer(HuggingFaceBaseTokenizer(**config), config)


def llama3_tokenizer(folder: Path) -> Llama3Tokenizer:
    """Llama 3's tokenizer class over a vocabulary of bytes and a few merges."""
    ranks = [bytes([i]) for i in range(256)] + [
        b"th",
        b"the",
        b" the",
        b"  ",
        b"    ",
        b"aa",
        b"aaaa",
        b"11",
        b"\n\n",
    ]
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks)))
    return Llama3Tokenizer(str(path))


def sentencepiece_model(folder: Path, model_type: str = "bpe") -> Path:
    """A SentencePiece model of 900 pieces trained on ``texts.corpus``, in Llama 2's manner."""
    import sentencepiece

    (folder / "corpus.txt").write_text("".join(corpus()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
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
    return folder / "tokenizer.model"


def qwen2_tokenizer(folder: Path, kind: type[Qwen2Tokenizer] = Qwen2Tokenizer) -> Qwen2Tokenizer:
    """Qwen2's tokenizer class over a vocabulary of bytes and a merge, its special tokens behind them."""
    folder.mkdir(exist_ok=True)
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["th"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("t h\n")
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    special = {name: len(vocab) + i for i, name in enumerate(names)}
    return kind(str(folder / "vocab.json"), str(folder / "merges.txt"), special)


def tiny_tokenizer(text: str, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on a text; BOS is id 0 and EOS id 1."""
    tokenizer = byte_level_bpe(text, TINY_VOCAB_SIZE)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def encoder_of(tokenizer: PreTrainedTokenizerFast, adds_bos: bool) -> TextEncoder:
    """The tokenizer as the recipe sees it."""
    return TextEncoder(
        encoding=Encoding(
            lambda text: np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        ),
        decode=tokenizer.decode,
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        adds_bos=adds_bos,
        vocab_size=TINY_VOCAB_SIZE,
        sha256=f"tiny {adds_bos}",
    )
