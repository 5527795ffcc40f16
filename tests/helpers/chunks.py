"""A text tokenised in chunks, however short it is."""

import numpy as np

from ppl_eval.tokenization import chunking
from ppl_eval.tokenization.encoders import Encoding


def in_chunks(
    encoding: Encoding, text: str, chunk_chars: int, part_chars: int = 97
) -> tuple[np.ndarray, int]:
    """Ids of the text in chunks, and how many chunks it took."""
    starts = range(0, len(text), part_chars)
    parts = [(0, text[i : i + part_chars], i + part_chars >= len(text)) for i in starts]
    made = list(chunking.cut(parts, encoding, chunk_chars))
    assert "".join(chunk.text for chunk in made) == text
    encoded = list(chunking.checked(chunking.encode_chunks(encoding.encode, made)))
    return np.concatenate([chunk.ids for chunk in encoded]), len(made)
