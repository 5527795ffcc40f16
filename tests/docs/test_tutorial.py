"""The tutorial's config and command lines are accepted; its numbers were measured by hand."""

import re
import shlex
from pathlib import Path

import pytest

from ppl_eval.config.settings import read_settings
from ppl_eval.config.yaml_files import find_config

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = [
    shlex.split(line)
    for line in "".join(BLOCKS).replace("\\\n", " ").splitlines()
    if line.startswith("tune run")
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mine.yaml`` as section 3 makes it: the shipped config with its lower half replaced."""
    (snippet,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    upper, dataset, _ = find_config("smollm2/135M_ppl").read_text().partition("dataset:\n")
    assert dataset
    (tmp_path / "mine.yaml").write_text(upper + snippet)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_command_lines_are_accepted(line: list[str], mine: None) -> None:
    arguments = line[line.index("distributed_ppl_eval") + 1 :]
    assert arguments[:2] == ["--config", "mine.yaml"]
    settings = read_settings(arguments)
    assert settings.output_dir.startswith("runs/")
    assert settings.max_windows is None


def test_baselines_are_runs_of_the_tutorial() -> None:
    words = {word for line in LINES for word in line}
    written = {word.removeprefix("output_dir=") for word in words if word.startswith("output_dir=")}
    read = {word.removeprefix("baseline=") for word in words if word.startswith("baseline=")}
    assert len(LINES) >= 5
    assert read <= {f"{folder}/result.json" for folder in written}
