"""The report as a browser shows it, and snippets for others."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.finished_runs import FINGERPRINT, write_run
from ppl_eval.commands.cli import main
from ppl_eval.reports.runs import read_runs
from ppl_eval.reports.snippets import lm_eval, markdown

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>console.error('ran')</script>"
BUCKET = {"context_tokens": [1, 4], "ce_loss": 2.0, "num_tokens": 30}


def full(num_windows: int = 6) -> dict[str, Any]:
    """What a real result holds beside the figures of ``write_run``."""
    part = {"ce_loss": 3.0, "num_tokens": 30, "perplexity_interval_95": [18.0, 22.0]}
    return {
        "perplexity_interval_95": [19.0, 21.5],
        "top1_accuracy": 0.4,
        "num_windows": num_windows,
        "num_documents": 1,
        "dtype": "fp32",
        "device": "cpu",
        "notes": [EVIL],
        "dataset": {"name": "text_files", "fingerprint": FINGERPRINT},
        "coverage": {"scored_tokens": 60, "expected_tokens": 60, "excluded_tokens": 0, "sha256": "ab"},
        "model": {"component": "m", "num_parameters": 5, "checkpoint": {"weights_hash": "w"}},
        "parallel": {"world_size": 1, "num_nodes": 1},
        "versions": {"torch": "2.13.0"},
        "timing": {
            "tokens_per_second": 5.0,
            "per_rank": {"score_seconds": {"min": 1.0, "mean": 1.0, "max": 1.0}},
        },
        "domains": {EVIL: part, "中文": part, "$x$": part},
        "positions": [BUCKET, {**BUCKET, "context_tokens": [5, 8], "ce_loss": 1.5}],
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two runs whose data are hostile, Chinese and Arabic."""
    folder = tmp_path_factory.mktemp("report")
    base = write_run(folder / "base", [20.0, 30.0, 40.0, 20.0, 30.0, 40.0], [10] * 6, **full())
    other = write_run(folder / "other", [21.0, 31.0, 43.0, 21.0, 31.0, 41.0], [10] * 6, **full())
    texts = [EVIL, "世界你好", "الإنسان"]
    rows = {
        "window_id": [2] * 3,
        "position": range(3),
        "token": range(3),
        "text": texts,
        "nll": [9.0, 4.0, 0.0],
        "rank": [7, 2, 1],
        "kl": [0.125, 0.0, 0.0],
    }
    for run in (base, other):
        (run / "tokens.parquet").mkdir()
        pq.write_table(
            pa.table({k: list(v) for k, v in rows.items()}), run / "tokens.parquet" / "part-000000.parquet"
        )
    main(["report", str(base), str(other), "-o", str(folder / "report.html")])
    return folder / "report.html"


def test_the_page_is_one_file_of_escaped_text(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 2
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:href=", "href="))
    assert "世界你好" in text
    assert 'dir="auto"' in text
    assert "NLL 9.000 · rank 7 · KL 0.1250" in text
    assert 'class="h10"' in text
    assert f"{math.exp(8 / 60):.6g}" in text, "the paired ratio"
    assert text.count("<svg") == 7, "positions, domains and windows of each run, and the ratio"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium) to render the page")
def test_chromium_renders_it_without_a_console_error(page: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert "Perplexity:" in done.stdout
    assert "</footer>" in done.stdout


def test_a_million_windows_stay_below_five_megabytes(tmp_path: Path) -> None:
    count = 1_000_000
    nll_W = np.random.default_rng(0).normal(30.0, 5.0, count)
    run = write_run(tmp_path / "run", nll_W.tolist(), [10] * count, **full(count))
    main(["report", str(run), "-o", str(tmp_path / "report.html")])
    assert (tmp_path / "report.html").stat().st_size < 5 * 2**20


def test_snippets(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a|b", [20.0], [10], **full(1))
    (read,) = read_runs([run])
    row = markdown([read]).splitlines()[2]
    assert row == r"| a\|b | text\_files | rolling, 8 tokens | 10 | 7.3891 | 19 to 21.5 |  |"
    found = json.loads(lm_eval([read]))
    assert found["results"]["a|b"]["perplexity,none"] == pytest.approx(math.exp(2.0))
    assert found["n-samples"]["a|b"] == {"original": 1, "effective": 1}


def test_one_run_with_a_reference_shows_its_divergence(tmp_path: Path) -> None:
    found = {"kl_mean": 0.125, "kl_interval_95": None, "same_top": 0.9, "perplexity_ratio": 1.5}
    found |= {"perplexity_ratio_interval_95": [1.25, 1.75], "kl_percentiles": {"50": 0.1, "99": 0.5}}
    found = {**full(), "comparison": found}
    run = write_run(tmp_path / "run", [20.0, 30.0], [10, 10], **found)
    main(["report", str(run), "-o", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text()
    assert "Mean KL divergence 0.125 nats per token" in text
    assert "1.25 to 1.75" in text
    assert 'aria-label="KL divergence"' in text
