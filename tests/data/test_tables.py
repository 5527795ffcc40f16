"""Tables: rows that are no text, columns that are not there, and broken lines."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from helpers.text_forms import write_arrow, write_csv, write_jsonl, write_parquet
from ppl_eval.data import text_files


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
