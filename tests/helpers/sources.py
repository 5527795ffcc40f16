"""Sources of data at hand, and their tokens as a run has them."""

from pathlib import Path
from typing import Any

from ppl_eval.data import TextSource
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import TokenData, open_tokens, prepare_tokens
from ppl_eval.tokenization.tokenizer import TextEncoder


def listed(texts: list[str]) -> TextSource:
    """Documents of a list."""
    return TextSource("listed", {}, lambda: iter(texts))


def tokens_of(
    source: Any,
    encoder: TextEncoder,
    cache: Path,
    join: str | None = None,
    bos: str = "never",
    word_separator: str = "white_space",
) -> TokenData:
    """The tokens of a source, made or found in a cache."""
    return open_tokens(prepare_tokens(source, EncodeRequest(encoder, join, bos, word_separator), cache))
