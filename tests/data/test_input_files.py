"""Files on disk: compressed ones, damaged ones, and stamps that see every change."""

import gzip
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import zstandard

from helpers.sources import tokens_of
from helpers.text_forms import write_arrow, write_parquet
from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import domains, hub_text, input_files, lm_eval_task, text_files, token_files


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


def test_a_stamp_sees_what_nobody_can_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    assert input_files.stamp_of([path]) is None
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    first = input_files.stamp_of([path])
    assert first == input_files.stamp_of([path]) is not None
    # Another file under the same name, with the same size and time of change.
    other = tmp_path / "b.txt"
    other.write_text("two")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert input_files.stamp_of([path]) != first


def test_a_stamp_holds_the_content_where_a_file_system_keeps_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    # As on a mount whose inodes and times of change are made up: every file there looks alike.
    monkeypatch.setattr(input_files, "_place", lambda path, at: [str(path), at.st_size, 0])
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = input_files.stamp_of([path])
    path.write_text("two")
    assert first is not None
    assert input_files.stamp_of([path]) != first
    path.write_text("one")
    assert input_files.stamp_of([path]) == first


def test_other_content_never_gets_the_tokens_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    encoder = hf_encoder(tmp_path)
    path = tmp_path / "a.txt"
    seen = []
    for text in ("the cat sat", "the dog ran", "the cat sat"):
        # In place: the inode, the size and the time of change stay.
        with open(path, "r+" if path.exists() else "w") as file:
            file.write(text)
        os.utime(path, ns=(10**18, 10**18))
        data = tokens_of(text_files(str(path)), encoder, tmp_path / "cache")
        assert data.tokens.tolist() == encoder.encoding.encode(text).tolist()
        seen.append(data.tokens.filename)
    assert seen[0] == seen[2] != seen[1]


def test_each_file_is_read_once_and_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "same.txt").write_text("one")
    (tmp_path / "link.md").symlink_to("a.txt")
    os.link(tmp_path / "b.txt", tmp_path / "hard.md")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    # What is only equal is another file.
    assert list(text_files("*.txt").read()) == ["one", "two", "one"]
    for again in (
        ["a.txt"],
        ["*.txt"],
        ["./a.txt"],
        [str(tmp_path / "a.txt")],
        ["link.md"],
        ["folder/../a.txt"],
    ):
        source = text_files(["a.txt", "b.txt", *again])
        notes: list[str] = []
        assert [part.text for part in source.parts(notes) if part.text][:2] == ["one", "two"]
        assert len([text for text in source.read() if text == "one"]) == (2 if again == ["*.txt"] else 1)
        assert len(notes) == 1
        assert Path(again[0]).name.replace("*", "a") in notes[0]
        assert "more than once" in notes[0]
    assert list(text_files(["b.txt", "hard.md", "linked/b.txt"]).read()) == ["two"]
    notes = []
    list(lm_eval_task(paths=["a.txt", "a.txt"]).parts(notes))
    assert "a.txt more than once" in notes[0]


def test_the_note_on_a_repeated_file_is_of_its_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    encoder, path = hf_encoder(tmp_path), str(tmp_path / "a.txt")
    Path(path).write_text("one two")
    for paths in ([path, path], [path], [path, path]):
        notes = tokens_of(text_files(paths), encoder, tmp_path / "cache").notes
        assert len(notes) == len(paths) - 1


def test_a_file_of_two_domains_is_scored_in_each_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    section = {"_component_": "ppl_eval.data.text_files", "paths": str(tmp_path / "a.txt")}
    notes: list[str] = []
    both = domains({"x": section, "y": {**section, "unit": "line"}})
    assert len([part for part in both.parts(notes) if part.text]) == 2
    assert len(notes) == 1
    assert "a.txt is in the domains x, y" in notes[0]


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ({"a": "b"}, r"dataset.paths is {'a': 'b'}; it must be a path, a glob, or a list"),
        ({0: "x"}, "must be a path, a glob, or a list"),
        (1984, "dataset.paths is 1984; it must be"),
        (None, "dataset.paths is None"),
        (True, "dataset.paths is True"),
        (b"a.txt", "must be a path"),
        ("", "dataset.paths is ''; it must be the name of a file"),
        ("  ", "must be the name of a file"),
        (["a.txt", 5], r"dataset.paths\[1\] is 5"),
        (["a.txt", None], r"dataset.paths\[1\] is None"),
        ([["a.txt"], "b"], r"dataset.paths\[0\] is \['a.txt'\]"),
        (["a.txt", ""], r"dataset.paths\[1\] is ''"),
        ([], "is empty"),
        (".", r"'\.' is a folder; name its files"),
    ],
)
def test_paths_that_are_none_are_refused(paths: Any, told: str) -> None:
    factories: list[Any] = [text_files, token_files]
    if paths is not None:  # There it stands for the task's own data set.
        factories.append(lambda paths: lm_eval_task("wikitext", paths))
    for factory in factories:
        with pytest.raises(ValueError, match=told):
            factory(paths)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str, name: str) -> None:
    text = 'text\n{"text": "plain words"}\n'
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(ValueError, match=rf"{name} is UTF-(16|32).*iconv -f UTF-(16|32)\w* -t UTF-8"):
        list(text_files(str(tmp_path / name)).read())


def test_a_nul_in_a_text_is_no_other_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\0b and more")
    assert list(text_files(str(tmp_path / "a.txt")).read()) == ["a\0b and more"]


def test_upper_case_endings_are_those_in_lower_case(tmp_path: Path) -> None:
    lines = b'{"text": "one"}\n'
    forms = {
        "A.TXT.GZ": gzip.compress(b"one"),
        "A.TXT.ZST": zstandard.compress(b"one"),
        "A.JSONL": lines,
        "A.JSONL.Gz": gzip.compress(lines),
        "A.CSV": b"text\none\n",
        "A.JSON": b'[{"text": "one"}]',
        "A.PARQUET": write_parquet_of(tmp_path, "one"),
    }
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        assert list(text_files(str(tmp_path / name)).read()) == ["one"], name


def test_forms_under_a_name_that_says_text(tmp_path: Path) -> None:
    forms = {
        "gzip data": gzip.compress(b"one"),
        "zstd data": zstandard.compress(b"one"),
        "a Parquet file": write_parquet_of(tmp_path, "one"),
    }
    for told, content in forms.items():
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.txt is {told}, not text"):
            list(text_files(str(tmp_path / "a.txt")).read())


def write_parquet_of(folder: Path, text: str) -> bytes:
    datasets.Dataset.from_dict({"text": [text]}).to_parquet(str(folder / "made"))
    return (folder / "made").read_bytes()
