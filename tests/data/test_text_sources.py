"""Text in every form that people have: the same documents, and clear words where a file is not what it should
be.
"""

import csv
import gzip
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from helpers.data_helpers import FRAGMENTS
from ppl_eval.data import TextSource, domains, hub_text, python_docs, text_files
from ppl_eval.data.tokenize import digest_of
from ppl_eval.tokenization.word_count import TextCounter, count_words

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


FORMS = [write_plain, write_jsonl, write_json, write_csv, write_parquet, write_arrow, write_gz, write_zst]


@pytest.mark.parametrize("write", FORMS)
def test_every_form_gives_the_same_documents_and_fingerprint(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    source = text_files(str(write(tmp_path)))
    assert list(source.read()) == DOCUMENTS
    assert digest_of(source) == digest_of(TextSource("list", {}, lambda: iter(DOCUMENTS)))


def test_saved_and_named_datasets_too(tmp_path: Path) -> None:
    saved = hub_text(str(write_saved(tmp_path)))
    assert list(saved.read()) == DOCUMENTS
    assert saved.stamp is not None
    # The library's own builders stand for a name on the hub.
    for streaming in (True, False):
        named = hub_text("json", split="train", data_files=str(write_jsonl(tmp_path)), streaming=streaming)
        assert list(named.read()) == DOCUMENTS
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows()[:3]), "test": datasets.Dataset.from_list(rows())}
    )
    splits.save_to_disk(str(tmp_path / "splits"))
    assert list(hub_text(str(tmp_path / "splits"), split="test").read()) == DOCUMENTS
    with pytest.raises(ValueError, match=r"split is 'valid'.*train, test"):
        list(hub_text(str(tmp_path / "splits"), split="valid").read())


def test_the_fingerprint_sees_content_and_boundaries() -> None:
    def facts(*texts: str) -> dict[str, str]:
        return digest_of(TextSource("list", {}, lambda: iter(texts)))[0]

    corpora = (["ab", "", "c"], ["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c "])
    assert len({facts(*texts)["text_sha256"] for texts in corpora}) == len(corpora)


@given(
    lines=st.lists(st.sampled_from(["", " ", "a", "b  ", "\r", "\u2028", "\x0c", "中"])),
    chunk=st.integers(1, 7),
    data=st.data(),
)
def test_units_do_not_depend_on_how_a_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], chunk: int, data: st.DataObject
) -> None:
    from ppl_eval.data import text_sources

    text = "\n".join(lines) + ("\n" if data.draw(st.booleans()) else "")
    path = tmp_path_factory.mktemp("units") / "file.txt"
    path.write_bytes(text.encode())
    whole = text_sources._CHUNK_BYTES
    try:
        text_sources._CHUNK_BYTES = chunk
        assert "".join(text_files(str(path)).read()) == text
        by_line = list(text_files(str(path), unit="line").read())
        assert "\n".join(by_line) == text.removesuffix("\n")
        paragraphs = list(text_files(str(path), unit="blank_line").read())
    finally:
        text_sources._CHUNK_BYTES = whole
    expected: list[list[str]] = [[]]
    for line in by_line:
        expected[-1].append(line) if line.strip() else expected.append([])
    assert paragraphs == ["\n".join(group) for group in expected if group]


def test_domains(tmp_path: Path) -> None:
    by_column = text_files(str(write_jsonl(tmp_path)), domain_column="kind")
    assert [part.domain for part in by_column.parts([])] == [row["kind"] for row in rows()]
    sources = {
        "docs": {"_component_": "ppl_eval.data.text_files", "paths": str(write_plain(tmp_path))},
        "rows": {"_component_": "ppl_eval.data.text_files", "paths": str(tmp_path / "corpus.jsonl")},
    }
    both = domains(sources)
    assert list(both.read()) == DOCUMENTS * 2
    assert "domains_sha256" in digest_of(both)[0]
    assert both.stamp is not None
    with pytest.raises(ValueError, match=r"sources\.x.*_component_"):
        domains({"x": "path"})
    with pytest.raises(ValueError, match="empty"):
        domains({})


def test_bad_lines_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    lines = [
        '{"text": "a"}',
        "{broken",
        '{"text": 5}',
        '{"text": null}',
        '["a"]',
        r'{"text": "\ud800"}',
        '{"other": "x"}',
        '{"text": "b"}',
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"broken\.jsonl line 2 is no JSON.*bad_lines=skip"):
        list(text_files(str(path)).read())
    notes: list[str] = []
    assert [part.text for part in text_files(str(path), bad_lines="skip").parts(notes)] == ["a", "b"]
    assert "6 of 8 rows" in notes[0]
    assert "line 2" in notes[0]
    for line, told in [
        (2, "type int"),
        (3, "NoneType"),
        (4, "not an object"),
        (5, "surrogate"),
        (6, "'text'.*other"),
    ]:
        path.write_text(lines[0] + "\n" + lines[line])
        with pytest.raises(ValueError, match=f"line 2.*{told}|{told}|column.*line 2"):
            list(text_files(str(path)).read())
    path.write_text("\n".join(lines[1:7]))
    with pytest.raises(ValueError, match="all 6 rows"):
        list(text_files(str(path), bad_lines="skip").read())


def test_broken_csv_lines(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text('text,kind\na,b\n"multi\nline",b\nonly one\nc,d\n')
    with pytest.raises(ValueError, match=r"line 5 has 1 fields, the first line has 2"):
        list(text_files(str(path)).read())
    notes: list[str] = []
    assert [part.text for part in text_files(str(path), bad_lines="skip").parts(notes)] == [
        "a",
        "multi\nline",
        "c",
    ]
    path.write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"broken\.csv is not UTF-8"):
        list(text_files(str(path)).read())


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet, write_arrow])
def test_a_wrong_column_lists_the_right_ones(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = str(write(tmp_path))
    with pytest.raises(ValueError, match=r"dataset\.column is 'txt'.*id, text, kind"):
        list(text_files(path, column="txt").read())
    with pytest.raises(ValueError, match=r"dataset\.domain_column is 'dom'.*id, text, kind"):
        list(text_files(path, domain_column="dom").read())


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": [1, 2], "b": ["x", None]}).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"row 1.*type int"):
        list(text_files(str(tmp_path / "a.parquet")).read())
    notes: list[str] = []
    source = text_files(str(tmp_path / "a.parquet"), column="b", bad_lines="skip")
    assert [part.text for part in source.parts(notes)] == ["x"]
    assert "1 of 2 rows" in notes[0]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.arrow").write_bytes(write_arrow(tmp_path).read_bytes()[:100])
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"some text " * 1000)[:-9])
    (tmp_path / "not.txt.gz").write_bytes(b"no gzip at all")
    (tmp_path / "cut.txt.zst").write_bytes(zstandard.compress(b"some text " * 1000)[:-3])
    (tmp_path / "not.txt.zst").write_bytes(b"no zstd at all")
    (tmp_path / "broken.json").write_text('[{"text": "a"},')
    for name in (
        "cut.parquet",
        "cut.arrow",
        "cut.txt.gz",
        "not.txt.gz",
        "cut.txt.zst",
        "not.txt.zst",
        "broken.json",
    ):
        with pytest.raises(ValueError, match=re.escape(name) + " is no"):
            list(text_files(str(tmp_path / name)).read())
    (tmp_path / "saved" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="save_to_disk"):
        list(hub_text(str(tmp_path / "saved")).read())


def test_zstd_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "two.txt.zst").write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two" * 100_000))
    assert list(text_files(str(tmp_path / "two.txt.zst")).read()) == ["one " + "two" * 100_000]


def test_text_that_is_not_utf8_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppl_eval.data import text_sources

    monkeypatch.setattr(text_sources, "_CHUNK_BYTES", 5)
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\ncaf\xe9 three")
    with pytest.raises(
        ValueError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 11 \(line 3\).*iconv"
    ):
        list(text_files(str(tmp_path / "latin.txt")).read())
    (tmp_path / "half.txt").write_bytes("中".encode()[:2])
    with pytest.raises(ValueError, match="offset 0"):
        list(text_files(str(tmp_path / "half.txt")).read())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"unit": "page"}, "unit is 'page'; allowed: file, line, blank_line"),
        ({"bad_lines": "warn"}, "bad_lines is 'warn'; allowed: error, skip"),
        ({"column": "text"}, "is no table"),
        ({"paths": "nothing*"}, "no file is named 'nothing\\*'"),
        ({"paths": []}, "empty"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=told):
        text_files(**{"paths": str(tmp_path / "a.txt"), **arguments})


def test_a_hub_dataset_needs_a_split_and_a_reachable_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"dataset\.split is missing"):
        hub_text("wikitext")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="save_to_disk"):
        list(hub_text("no/such-dataset", split="test").read())


@given(
    fragments=st.lists(st.sampled_from([*FRAGMENTS, "\x1c", "\x85", "\u2003", "é"])),
    cuts=st.lists(st.integers(0, 5000)),
    repeats=st.sampled_from([1, 40]),
)
def test_words_and_bytes_are_counted_as_the_references_do(
    fragments: list[str], cuts: list[int], repeats: int
) -> None:
    # Short texts and long ones are counted in two ways.
    text = "".join(fragments) * repeats
    expected = {"white_space": len(re.split(r"\s+", text)), "space": len(text.strip().split(" "))}
    for separator, num_words in expected.items():
        counter = TextCounter(separator)
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        for start, stop in pairwise(edges):
            counter.add(text[start:stop])
        size = counter.size()
        assert (size.num_bytes, size.num_words) == (len(text.encode()), num_words)
        assert size.has_crlf == ("\r\n" in text)
    assert count_words(text) == expected["white_space"]


def test_python_docs_are_there() -> None:
    assert len(list(python_docs().read())) > 50
