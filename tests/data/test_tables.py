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


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("text,text\na,b\n")
    with pytest.raises(ValueError, match=r"twice\.csv .* has 2 columns named 'text'.*rename"):
        list(text_files(str(path), bad_lines="skip").read())
    path.write_text("kind,text,kind\na,b,c\n")
    with pytest.raises(ValueError, match="2 columns named 'kind'"):
        list(text_files(str(path), domain_column="kind").read())
    # Columns that are not read may have any names, such as the empty ones of a data frame's index.
    path.write_text(",text,\n1,b,2\n")
    assert list(text_files(str(path)).read()) == ["b"]


def test_a_json_object_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", '{"text": "ok"}\n{"text": "a", "text": "b"}\n'),
        ("a.json", '[{"text": "ok"}, {"text": "a", "text": "b"}]'),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ValueError, match=rf"{name} (line|row) 2 has the key 'text' more than once"):
            list(text_files(str(path)).read())
        notes: list[str] = []
        assert [part.text for part in text_files(str(path), bad_lines="skip").parts(notes)] == ["ok"]
        assert "1 of 2 rows" in notes[0]
    path.write_text('[{"text": "a", "id": 1, "id": 2, "meta": {"text": 1, "text": 2}}]')
    assert list(text_files(str(path)).read()) == ["a"]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream.arrow"])
def test_a_binary_table_with_two_columns_of_one_name_is_refused(tmp_path: Path, kind: str) -> None:
    import pyarrow
    from pyarrow import ipc, parquet

    for names in (["text", "text", "x"], ["x", "x", "text"]):
        table = pyarrow.Table.from_arrays([pyarrow.array([name]) for name in "abc"], names=names)
        path = tmp_path / f"twice.{kind}"
        if kind == "parquet":
            parquet.write_table(table, path)
        else:
            new = ipc.new_stream if kind == "stream.arrow" else ipc.new_file
            with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(ValueError, match=rf"{path.name} has 2 columns named '{names[1]}'"):
            list(text_files(str(path)).read())


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path: Path, name: str) -> None:
    content = {
        "a.json": ' \n[{"text": "one"},\n {"text": "two"}]',
        "a.jsonl": '{"text": "one"}\n{"text": "two"}\n',
        "a.csv": "text\none\ntwo\n",
    }[name]
    (tmp_path / name).write_text("\ufeff" + content)
    assert list(text_files(str(tmp_path / name)).read()) == ["one", "two"]
