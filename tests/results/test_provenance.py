"""What the result says about the run itself."""

import hashlib
import shutil
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from torch import nn

from helpers.runs import many, result_of
from helpers.tiny import write_config
from ppl_eval.models.cpu_linear import OneDNNLinear, is_available
from ppl_eval.results.provenance import git_commit

LINEAR = OneDNNLinear if is_available() else nn.Linear


def test_the_result_says_how_to_repeat_the_run(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=4)
    before = datetime.now(UTC).replace(microsecond=0)
    finished = many(2, [["--config", str(config)]], tmp_path)
    assert finished.code == 0, finished.output
    result = result_of(tmp_path / "out")
    run = result["run"]
    start, end = (datetime.fromisoformat(run[name]) for name in ("start", "end"))
    assert before <= start <= end <= datetime.now(UTC)
    assert Path(run["command"][0]).name == "many_runs.py"
    assert run["hosts"] == [{"host": socket.gethostname(), "ranks": [0, 1]}]
    assert run["checkpoint"] == {"checkpoint_dir": str(tiny.folder)}
    assert run["tokenizer"]["component"].endswith(".HuggingFaceBaseTokenizer")
    assert run["tokenizer"]["paths"]["tokenizer_json_path"] == str(tiny.folder / "tokenizer.json")
    assert run["tokenizer"]["sha256"] == result["dataset"]["fingerprint"]["tokenizer_sha256"]
    assert len(run["tokenizer"]["sha256"]) == hashlib.sha256().digest_size * 2
    assert run["threads"] == 1
    assert run["kernels"] == {
        "attention": ["ppl_eval.models.attention.attend"],
        "rotary": ["ppl_eval.models.cpu_rotary.WholeRotary"],
        "linear": [
            f"{OneDNNLinear.__module__}.OneDNNLinear" if is_available() else "torch.nn.modules.linear.Linear"
        ],
        "concurrent_batches": 1,
    }
    for package in ("datasets", "transformers", "tokenizers", "pyarrow", "distributed_ppl_eval"):
        assert result["versions"][package] == version(package)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_checkout(tmp_path: Path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert git_commit(tmp_path) == head.stdout.strip()
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head.stdout.strip()}-dirty"
