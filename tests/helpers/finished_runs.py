"""Folders of finished runs with numbers chosen by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FINGERPRINT = {"text_sha256": "t", "tokenizer_sha256": "k", "join": "", "bos_tokens": []}


def write_run(
    folder: Path,
    nll_W: Sequence[float],
    tokens_W: Sequence[int],
    documents_W: Sequence[int] | None = None,
    domains_W: Sequence[str] | None = None,
    contents_W: Sequence[int] | None = None,
    **more: Any,
) -> Path:
    """Write result.json and windows.parquet of a run whose windows have this NLL and these tokens."""
    folder.mkdir(parents=True)
    count, total, tokens = len(nll_W), math.fsum(nll_W), sum(tokens_W)
    result = {
        "schema": 1,
        "nll_sum": total,
        "nll_sum_hex": total.hex(),
        "num_tokens": tokens,
        "ce_loss": total / tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": None,
        "protocol": {"name": "rolling", "max_seq_len": 8},
        "dataset": {"fingerprint": FINGERPRINT},
        "coverage": {"expected_tokens": tokens, "sha256": f"{count}"},
        "model": {"checkpoint": {"weights_hash": "w"}},
        "quantizer": None,
        **more,
    }
    (folder / "result.json").write_text(json.dumps(result))
    columns = {
        "window_id": list(range(count)),
        "document": list(documents_W or [0] * count),
        "domain": list(domains_W or ["all"] * count),
        "start": [8 * i for i in range(count)],
        "score_start": [8 * i for i in range(count)],
        "stop": [8 * i + n for i, n in enumerate(tokens_W)],
        "num_tokens": list(tokens_W),
        "nll_sum": list(map(float, nll_W)),
        "content": list(contents_W or range(100, 100 + count)),
    }
    pq.write_table(pa.table(columns), folder / "windows.parquet")
    return folder


def write_documents(
    folder: Path, nll_D: Sequence[float], tokens_D: Sequence[int], bytes_D: Sequence[int]
) -> None:
    """Write documents.parquet of a run."""
    columns = {
        "document": list(range(len(nll_D))),
        "domain": ["all"] * len(nll_D),
        "num_tokens": list(tokens_D),
        "num_bytes": list(bytes_D),
        "nll_sum": list(map(float, nll_D)),
    }
    pq.write_table(pa.table(columns), folder / "documents.parquet")
