"""`ppl-eval sweep`: the grid, a sweep that is killed and goes on, its summary, a job array."""

import csv
import json
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from helpers.processes import Script
from helpers.runs import PPL_EVAL, result_of, run
from helpers.tiny import write_config
from ppl_eval.commands import cli
from ppl_eval.experiments.sweep_file import read_sweep

GRID = {
    "length": {
        "short": {"protocol.max_seq_len": 32, "tags.tokens": 32},
        "long": {"protocol.max_seq_len": 64, "tags.tokens": 64},
    },
    "dtype": ["fp32", "bf16"],
}


def write_sweep(folder: Path, tiny, **keys) -> Path:
    base = write_config(folder / "base.yaml", tiny.folder, tiny.text, max_windows=6, per_window=True)
    content = {"base": str(base), "output_dir": str(folder / "sweep"), **keys}
    OmegaConf.save(OmegaConf.create(content), folder / "sweep.yaml")
    return folder / "sweep.yaml"


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with open(path / "summary.csv") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_a_grid_is_every_combination_and_further_runs(tiny, tmp_path):
    path = write_sweep(
        tmp_path, tiny, grid=GRID, overrides={"batch_size": 3}, runs=[{"name": "more", "max_windows": 2}]
    )
    sweep = read_sweep(path)
    assert [run.name for run in sweep.runs] == ["short-fp32", "short-bf16", "long-fp32", "long-bf16", "more"]
    config = sweep.runs[1].config
    assert (config.dtype, config.protocol.max_seq_len, config.batch_size) == ("bf16", 32, 3)
    assert config.protocol._component_ == "ppl_eval.protocols.disjoint"
    assert sweep.runs[1].tags == {"tokens": 32}
    assert sweep.runs[4].config.max_windows == 2
    assert sweep.runs[0].config.max_windows == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grid": {"dtype": ["fp23"]}}, "run fp23: dtype is 'fp23'"),
        ({"grid": {"dtype": "fp32"}}, "grid.dtype must be a list"),
        ({"grid": {"dtype": ["fp32"]}, "compare_to": "bf16"}, "compare_to is 'bf16'"),
        ({"gird": {}}, "unknown key 'gird'"),
        ({}, "has 0 runs"),
        ({"runs": [{"dtype": "fp32"}]}, r"runs\[0\] has no name"),
        ({"runs": [{"name": "../a"}]}, "cannot name a run"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "two runs are called 'a'"),
        ({"runs": [{"name": "a", "tags": {"x": [1]}}]}, "tags.x is"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tiny, tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        read_sweep(write_sweep(tmp_path, tiny, **keys))


def test_a_sweep_runs_what_is_not_done(tiny, tmp_path):
    path = write_sweep(
        tmp_path, tiny, grid={"dtype": ["fp32", "bf16"]}, compare_to="fp32", overrides={"max_windows": 2}
    )
    assert (first := run(PPL_EVAL, "sweep", str(path), "--only", "0")).code == 0, first.output
    written = (tmp_path / "sweep" / "runs" / "fp32" / "result.json").stat().st_mtime_ns
    assert (second := run(PPL_EVAL, "sweep", str(path))).code == 0, second.output
    assert (tmp_path / "sweep" / "runs" / "fp32" / "result.json").stat().st_mtime_ns == written
    rows = rows_of(tmp_path / "sweep")
    assert [row["state"] for row in rows.values()] == ["done", "done"]
    assert float(rows["bf16"]["perplexity_ratio"]) == pytest.approx(
        float(rows["bf16"]["perplexity"]) / float(rows["fp32"]["perplexity"])
    )


@pytest.fixture(scope="module")
def killed(tiny, tmp_path_factory):
    """A sweep of eight runs, one of them wrong, killed after two or more were done; then started again."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = [{"name": f"w{n}", "max_windows": n, "tags": {"windows": n}} for n in range(2, 5)]
    runs.append({"name": "wrong", "protocol.max_seq_len": 4096})
    path = write_sweep(folder, tiny, grid=GRID, runs=runs, compare_to="long-fp32")
    done = folder / "sweep" / "runs"
    first = Script([PPL_EVAL, "sweep", str(path), "--slots", "2"], {}, folder / "first.txt")
    try:
        deadline = time.monotonic() + 120
        while len(list(done.glob("*/result.json"))) < 2:
            assert time.monotonic() < deadline, first.output()
            time.sleep(0.05)
    finally:
        first.kill()
    before = {file.parent.name: file.stat().st_mtime_ns for file in done.glob("*/result.json")}
    again = run(PPL_EVAL, "sweep", str(path), "--slots", "2")
    return path, before, again


@pytest.mark.slow
def test_a_killed_sweep_goes_on(killed):
    path, before, again = killed
    folder = path.parent / "sweep"
    assert 2 <= len(before) < 7
    assert again.code == 1, again.output
    for name, written in before.items():
        assert (folder / "runs" / name / "result.json").stat().st_mtime_ns == written
    rows = rows_of(folder)
    assert [row["state"] for row in rows.values()] == ["done"] * 7 + ["failed"]
    assert "wrong failed, exit code 2: error: " in again.output
    assert "4096" in again.output
    for name, row in rows.items():
        if name != "wrong":
            assert row["nll_sum_hex"] == result_of(folder / "runs" / name)["nll_sum_hex"]


@pytest.mark.slow
def test_the_summary_compares_and_carries_tags(killed):
    path, _, _ = killed
    folder = path.parent / "sweep"
    rows = {row["run"]: row for row in pq.read_table(folder / "summary.parquet").to_pylist()}
    base, other = rows["long-fp32"], rows["long-bf16"]
    assert (base["perplexity_ratio"], base["same_bits"]) == (1.0, True)
    assert other["perplexity_ratio"] == pytest.approx(other["perplexity"] / base["perplexity"], rel=1e-12)
    assert (rows["short-bf16"]["tokens"], rows["w3"]["windows"]) == (32, 3)
    # w3's windows are the first three of the base's.
    assert (rows["w3"]["perplexity_ratio"], rows["w3"]["same_bits"]) == (1.0, True)
    page = (folder / "summary.html").read_text()
    assert page.count("hsl(") == 4
    assert "http" not in page


@pytest.mark.slow
def test_a_changed_config_runs_again_and_keeps_the_old_result(killed, tiny):
    path, _, _ = killed
    content = OmegaConf.load(path)
    content.runs = [{"name": "w2", "max_windows": 1}]
    del content["grid"], content["compare_to"]
    changed = path.with_name("changed.yaml")
    OmegaConf.save(content, changed)
    folder = path.parent / "sweep" / "runs"
    assert run(PPL_EVAL, "sweep", str(changed), "--only", "0").code == 0
    assert result_of(folder / "w2")["num_windows"] == 1
    assert result_of(folder / "w2.old-1")["num_windows"] == 2


@pytest.mark.slow
def test_a_job_array_runs_one_run_a_task(killed, capsys):
    path, _, _ = killed
    cli.main(["sweep", str(path), "--emit", "slurm", "--slots", "3"])
    script = path.parent / "sweep" / "sweep.sbatch"
    assert "#SBATCH --array=0-7%3" in script.read_text()
    # Run 5 is done; the script finds that out.
    done = subprocess.run(
        ["bash", str(script)],
        env={"SLURM_ARRAY_TASK_ID": "5", "PATH": f"{Path(PPL_EVAL).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 runs, 1 of them done before" in done.stdout
    assert json.loads((path.parent / "sweep" / "runs" / "w3" / "result.json").read_text())


@pytest.mark.slow
def test_perplexity_against_a_tag_is_one_command(killed, capsys):
    pytest.importorskip("matplotlib")
    path, _, _ = killed
    cli.main(["sweep", str(path), "--plot", "tokens"])
    assert (path.parent / "sweep" / "plot-tokens.png").read_bytes()[:4] == b"\x89PNG"
