"""The example notebook runs from the first cell to the last, and shows what its text says."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "examples" / "perplexity.ipynb"


def run_cell(source, names):
    """Run a cell as a notebook does; returns the value of its last line, if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.smollm2
def test_the_notebook_runs(smollm2, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * 5
    names = {"__name__": "__main__"}
    shown = [run_cell(cell["source"], names) for cell in cells if cell["cell_type"] == "code"]
    result, windows, against, table, _ = shown
    assert result.num_tokens == 4 * 127
    assert len(windows) == 4
    assert windows["ce_loss"].is_monotonic_increasing
    assert against["same_bits"] is False
    assert table["dtype"].tolist() == ["bf16", "fp32"]
    assert abs(table["perplexity"][0] / table["perplexity"][1] - 1) < 0.05
    assert "did you mean 'batch_size'" in capsys.readouterr().out
    assert (tmp_path / "notebook-run" / "result.json").is_file()
