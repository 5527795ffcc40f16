"""The text of windows, token by token, from ``tokens.parquet``."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ppl_eval.reports.runs import Run

_PART = "\ufffd"
_LONGEST_CHARACTER = 8
Decode = Callable[[Sequence[int]], str]


def token_groups(run: Run, table: pa.Table) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a window's tokens as readable text: parts of one character stand together.

    ``tokens.parquet`` holds the text of single tokens, where a part of a character has none. If the
    tokenizer's file is still where the run found it, such neighbours are decoded together.

    Returns:
        Text and the rows behind it, in order.
    """
    rows = table.to_pylist()
    decode = _decoder(run)
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    index = 0
    while index < len(rows):
        text, length = rows[index]["text"], 1
        if _PART in text and decode is not None:
            text, length = _whole(decode, rows[index:])
        groups.append((text, rows[index : index + length]))
        index += length
    return groups


def plain_text(run: Run, table: pa.Table) -> str:
    """Return the scored text of a window."""
    return "".join(text for text, _ in token_groups(run, table))


def _whole(decode: Decode, rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    ids: list[int] = []
    for length, row in enumerate(rows[:_LONGEST_CHARACTER], start=1):
        if length > 1 and row["position"] != rows[length - 2]["position"] + 1:
            break
        ids.append(row["token"])
        text = decode(ids)
        if _PART not in text:
            return text, length
    return rows[0]["text"], 1


def _decoder(run: Run) -> Decode | None:
    facts = run.result.get("run", {}).get("tokenizer", {})
    return _load(facts.get("paths", {}).get("tokenizer_json_path"))


@cache
def _load(path: str | None) -> Decode | None:
    if path is None or not Path(path).is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # tokenizers raises a bare Exception for a file that it cannot read
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
