"""Small tokenizers of every kind, and texts that are hard on them."""

import base64
import json
import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from ppl_eval.tokenization.encoders import Encoding, encoding_of
from ppl_eval.tokenization.tokenizer import TextEncoder, wrap_tokenizer

ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "The sum is 3."},
    {"instruction": "Say nothing.", "input": "", "output": ""},
    {"instruction": "Name a fruit.", "input": "", "output": "aaaa apple the"},
    {"instruction": "的", "input": "", "output": "中文 😀"},
]

# What breaks tokenizers at seams: runs (their phase), joiners, line ends, scripts without spaces, digits in
# threes.
FRAGMENTS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u200b",
    "\u200d",
    "\u3000",
    "\ufeff",
    "a",
    "aaaa",
    "the",
    " the",
    "The cat",
    "'s",
    "'ll",
    "1",
    "123",
    "11111111",
    "0.5",
    "...",
    "—",
    "!!!",
    "中文",
    "中文分词没有空格",
    "日本語。",
    "한국어",
    "naïve",
    "e\u0301",
    "👩‍👩‍👧",
    "😀😀😀",
    "🇫🇷",
    "العربية",
    "<|endoftext|>",
    "<s>",
    "x" * 60,
    " " * 70,
    "\n" * 50,
    "1" * 41,
    "ab" * 30,
    "def f(x):\n    return x\n",
]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def nasty_text(seed: int, num_fragments: int = 400) -> str:
    chosen = random.Random(seed)
    return "".join(chosen.choice(FRAGMENTS) for _ in range(num_fragments))


def corpus() -> list[str]:
    return [nasty_text(seed) for seed in range(1000, 1020)] + [
        "the cat sat on the mat\n" * 20,
        "aaaa aa aaa 111 1111",
    ] * 3


def train(kind: str) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "<|endoftext|>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
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
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def hf_config(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """A config section for a tokenizer that is written to a folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return {
        "tokenizer_json_path": str(folder / "tokenizer.json"),
        "tokenizer_config_json_path": str(folder / "tokenizer_config.json"),
    }


def hf_encoding(kind: str, folder: Path) -> Encoding:
    config = hf_config(train(kind), folder)
    return encoding_of(HuggingFaceBaseTokenizer(**config), config)


def hf_encoder(folder: Path, kind: str = "byte_level") -> TextEncoder:
    config = hf_config(train(kind), folder)
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
