"""The same documents in every form that people have."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import zstandard

# Texts that careless readers change: look-alikes of null and of numbers, line ends, quotes, blanks, joiners.
DOCUMENTS = [
    "NA",
    "null",
    "007",
    "1e5",
    "True",
    " two  spaces ",
    "a\r\nb",
    "a\rb",
    'tab\tand "quotes", comma',
    "中文。\n第二行",
    "👩‍👩‍👧 family\u200b",
    "\x0cform\x1cfeed\u2028line",
    "e\u0301 é",
    "'",
    "last\n\n",
]


def rows() -> list[dict[str, str]]:
    return [
        {"id": str(i), "text": text, "kind": "odd" if i % 2 else "even"} for i, text in enumerate(DOCUMENTS)
    ]


def write_jsonl(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def write_json(folder: Path) -> Path:
    path = folder / "corpus.json"
    path.write_text(json.dumps(rows(), ensure_ascii=False, indent=1))
    return path


def write_csv(folder: Path) -> Path:
    path = folder / "corpus.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "kind"])
        writer.writeheader()
        writer.writerows(rows())
    return path


def write_parquet(folder: Path) -> Path:
    datasets.Dataset.from_list(rows()).to_parquet(str(folder / "corpus.parquet"))
    return folder / "corpus.parquet"


def write_saved(folder: Path) -> Path:
    datasets.Dataset.from_list(rows()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_arrow(folder: Path) -> Path:
    (path,) = write_saved(folder).glob("*.arrow")
    return path


def write_gz(folder: Path) -> Path:
    path = folder / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder).read_bytes()))
    return path


def write_zst(folder: Path) -> Path:
    path = folder / "corpus.csv.zst"
    path.write_bytes(zstandard.compress(write_csv(folder).read_bytes()))
    return path


def write_plain(folder: Path) -> Path:
    (folder / "plain").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (folder / "plain" / f"{i:02}.txt").write_bytes(text.encode())
    return folder / "plain" / "*.txt"
