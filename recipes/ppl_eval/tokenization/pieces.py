"""The text that a single token stands for, for people to read."""

from collections.abc import Sequence
from typing import Any

from ppl_eval.tokenization.tokenizer import TextEncoder


def token_texts(encoder: TextEncoder, ids: Sequence[int]) -> list[str]:
    """Return the text of each id as it stands inside a text; special tokens by their names.

    A token that is a part of a character has the replacement character for its bytes.
    """
    # Behind another token: some tokenizers drop the space before a text's first one.
    (*_, anchor) = encoder.encode("a").tolist()
    before = encoder.decode([anchor])
    texts = []
    for token in ids:
        text = encoder.decode([anchor, token])
        text = text[len(before) :] if text.startswith(before) else encoder.decode([token])
        texts.append(text or _name(encoder.tokenizer, token))
    return texts


def _name(tokenizer: Any, token: int) -> str:
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is not None and hasattr(inner, "id_to_token"):
        return inner.id_to_token(token) or ""
    special = getattr(tokenizer, "special_tokens", None) or {}
    return next((name for name, number in special.items() if number == token), "")
