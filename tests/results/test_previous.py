"""Two evaluations in one output_dir: the older one's files move aside, and nothing of the two is mixed."""

import json

import pyarrow.parquet as pq
import pytest

from helpers.runs import many, result_of
from helpers.tiny import write_config
from ppl_eval.results.previous import set_aside


def put(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        name = name.replace("_", ".")
        (folder / name).write_text(json.dumps(content) if name.endswith("json") else content)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_another_evaluation_moves_aside_and_the_same_one_stays(tmp_path):
    files = {"windows_parquet": "w", "documents_parquet": "d", "report_html": "r", "notes_txt": "mine"}
    put(tmp_path, result_json={"key": "old"}, **files)
    assert set_aside(tmp_path, "old", None) is None
    assert "previous/old" in set_aside(tmp_path, "new", None)
    theirs = ("documents.parquet", "report.html", "result.json", "windows.parquet")
    moved = [f"previous/old/{name}" for name in theirs]
    assert names(tmp_path) == ["notes.txt", *moved]
    assert set_aside(tmp_path, "new", None) is None


def test_files_whose_key_is_unknown_are_named_by_their_time(tmp_path):
    put(tmp_path, result_json={"perplexity": 1.0})
    assert set_aside(tmp_path, "new", None)
    (moved,) = names(tmp_path)
    assert moved.startswith("previous/2")


def test_tables_of_an_unfinished_run_of_the_same_plan_stay(tmp_path):
    put(tmp_path, windows_parquet="w")
    (tmp_path / "ledger" / "new").mkdir(parents=True)
    assert set_aside(tmp_path, "new", None) is None
    assert set_aside(tmp_path, "other", None)


def test_a_baseline_is_not_moved_away_from_under_the_run(tmp_path):
    put(tmp_path, result_json={"key": "old"})
    with pytest.raises(ValueError, match="another output_dir"):
        set_aside(tmp_path, "new", str(tmp_path / "result.json"))
    assert names(tmp_path) == ["result.json"]


def test_two_runs_in_one_folder(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=4, per_window=True)
    argv = ["--config", str(config)]
    finished = many(1, [argv, [*argv, "max_windows=3", "per_window=false"]], tmp_path)
    assert finished.code == 0, finished.output
    out = tmp_path / "out"
    (old,) = (out / "previous").iterdir()
    assert result_of(out)["num_windows"] == 3
    assert not (out / "windows.parquet").exists()
    assert result_of(old)["num_windows"] == 4
    assert result_of(old)["key"] == old.name != result_of(out)["key"]
    assert pq.read_table(old / "windows.parquet").num_rows == 4
    assert finished.output.count(f"moved to {old}") == 1, finished.output
