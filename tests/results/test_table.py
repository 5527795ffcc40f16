"""What people and programs read: the table, strict JSON, and progress on a terminal and off one."""

import io
import json
import math

import numpy as np
import pytest

from ppl_eval.config.files import write_json
from ppl_eval.metrics.figures import figures
from ppl_eval.metrics.totals import Totals, WindowScores
from ppl_eval.results.progress import Progress


def totals_of(nll, tokens):
    totals = Totals()
    one = np.array([tokens], dtype=np.int64)
    totals.add(WindowScores(np.array([nll]), np.array([nll**2 / tokens]), one, one))
    return totals


def test_a_perplexity_that_overflows_is_still_strict_json(tmp_path):
    found = figures(totals_of(80_000.0, 100), 10, 5)
    write_json(tmp_path / "result.json", found)
    text = (tmp_path / "result.json").read_text()
    read = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert math.isinf(float(read["perplexity"]))
    assert read["ce_loss"] == 800.0
    assert read["nll_sum"] == 80_000.0


def test_progress_off_a_terminal_is_plain_lines():
    clock = iter([0.0, 4.0, 10.0, 11.0])
    stream = io.StringIO()
    progress = Progress(2000, 2, enabled=True, stream=stream, clock=clock.__next__)
    for _ in range(3):
        progress.update(totals_of(200 * math.log(8), 200), 0.5)
    progress.close()
    said = stream.getvalue()
    assert "\r" not in said
    assert said.count("\n") == 1, "a line at most every 10 seconds"
    assert (
        "scored 200 of 1,000 tokens (rank 0 of 2), perplexity so far 8.0000, 20 tokens/s, 40 s left" in said
    )


def test_progress_on_a_terminal_is_a_bar():
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = Progress(1000, 1, enabled=True, stream=stream)
    progress.update(totals_of(200 * math.log(8), 200), 1.0)
    progress.close()
    assert "\r" in stream.getvalue()
    assert "perplexity 8.0000" in stream.getvalue()


def test_other_ranks_show_nothing():
    stream = io.StringIO()
    progress = Progress(1000, 2, enabled=False, stream=stream)
    progress.update(totals_of(1.0, 1), 0.5)
    progress.close()
    assert stream.getvalue() == ""
