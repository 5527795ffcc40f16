"""Texts that are hard on tokenizers, and chats for fine-tuning."""

import random

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


def nasty_text(seed: int, num_fragments: int = 400) -> str:
    chosen = random.Random(seed)
    return "".join(chosen.choice(FRAGMENTS) for _ in range(num_fragments))


def corpus() -> list[str]:
    return [nasty_text(seed) for seed in range(1000, 1020)] + [
        "the cat sat on the mat\n" * 20,
        "aaaa aa aaa 111 1111",
    ] * 3
