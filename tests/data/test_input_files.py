"""Files on disk: compressed ones, damaged ones, and stamps that see every change."""

import gzip
import os
import re
from pathlib import Path

import pytest
import zstandard

from helpers.text_forms import write_arrow, write_parquet
from ppl_eval.data import hub_text, input_files, text_files


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
