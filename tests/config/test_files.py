"""Files and folders that are there whole or not at all, after a failure and after a kill."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ppl_eval.config.files import whole_file, whole_folder, write_json


def test_nothing_shows_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with whole_file(path) as file:
        file.write("new ü")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == "new ü".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(TypeError, match="bytes-like"), whole_file(path, "wb") as file:
        file.writelines([b"half", "no bytes"])
    assert path.read_bytes() == b"old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), whole_file(tmp_path / "folder") as file:
        file.write("x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.bin", "folder"}


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_the_umask_counts_and_others_never_write(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "a") as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def test_a_link_is_replaced_and_what_it_points_to_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    write_json(tmp_path / "link", {})
    assert (tmp_path / "other").read_text() == "other"
    assert not (tmp_path / "link").is_symlink()


def test_json_is_strict_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 0.1 + 0.2, "b": ["ü"]})
    assert json.loads(path.read_text()) == {"a": 0.1 + 0.2, "b": ["ü"]}
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            write_json(path, {"a": value})
    assert json.loads(path.read_text()) == {"a": 0.1 + 0.2, "b": ["ü"]}
    assert list(tmp_path.iterdir()) == [path]


def fill(folder: Path, files: dict[str, Any]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(TypeError, match="must be str"), whole_folder(path) as half:
        fill(half, {"a": "half", "b": b"no text"})
    assert not list(tmp_path.iterdir())
    with whole_folder(path) as half:
        (half / "a").write_text("all")
        assert not path.exists()
    assert [file.read_text() for file in path.iterdir()] == ["all"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from ppl_eval.config.files import whole_file, whole_folder

    folder = Path(sys.argv[1])
    with whole_folder(folder / "folder") as half, whole_file(folder / "file") as file:
        (half / "old").write_text("half")
        file.write("half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_not_taken_for_whole(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "folder").exists()
    assert not (tmp_path / "file").exists()
    with whole_folder(tmp_path / "folder") as half:
        (half / "new").write_text("all")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["new"]
