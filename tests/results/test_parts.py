"""Parts without a process group of the others, and their merge to the result of one run."""

import json
import re
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.runs import PPL_EVAL, many, run
from ppl_eval.config.parts import read_part
from results.test_resume import change, everything, killed, ledger_of  # noqa: F401


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1/2/3"])
def test_a_part_is_one_of_some(part):
    with pytest.raises(ValueError, match="it must be like 3/16"):
        read_part(part)
    assert read_part("3/16") == (3, 16)


@pytest.fixture(scope="module")
def parts(killed, tmp_path_factory):  # noqa: F811
    """Three parts of the run that ``killed`` has undisturbed, and one of another run."""
    _, config = killed
    folder = tmp_path_factory.mktemp("parts")
    argv = ["--config", str(config), f"output_dir={folder / 'out'}"]
    jobs = [[*argv, f"part={i}/3"] for i in (3, 1)]
    other = [*argv[:2], f"output_dir={folder / 'other'}", "part=2/3", "protocol.max_seq_len=32"]
    finished = many(1, [*jobs, other], folder)
    assert finished.code == 0, finished.output
    assert "When all parts are done: ppl-eval merge" in finished.output
    finished = many(2, [[*argv, "part=2/3"]], folder)
    assert finished.code == 0, finished.output
    return folder


def merged(*folders, out):
    return run(PPL_EVAL, "merge", *map(str, folders), "-o", str(out))


def test_parts_make_the_result_of_one_run(killed, parts, tmp_path):  # noqa: F811
    expected, _ = everything(killed[0] / "alone")
    finished = merged(parts / "out", out=tmp_path)
    assert finished.code == 0, finished.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["plan"].pop("num_parts") == 3
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert everything(tmp_path)[0] == expected
    # The parts ran as they say, one of them on two ranks; the merge is a run of its own.
    run, of_parts = result["run"], result["run"]["parts"]
    assert [part["part"] for part in of_parts] == ["1/3", "2/3", "3/3"]
    assert [sum(len(host["ranks"]) for host in part["hosts"]) for part in of_parts] == [1, 2, 1]
    assert {host["host"] for part in of_parts for host in part["hosts"]} == {socket.gethostname()}
    assert all(Path(part["command"][0]).name == "many_runs.py" for part in of_parts)
    assert all(part["start"] <= part["end"] <= run["start"] <= run["end"] for part in of_parts)
    assert run["command"][1] == "merge"


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_without_its_package_is_told_before_parts_are_read(parts, tmp_path):
    from ppl_eval.commands.merge import merge

    out = shutil.copytree(parts / "out", tmp_path / "out")
    for path in out.glob("*/part.json"):
        about = json.loads(path.read_text())
        about["config"]["metric_logger"] = {"_component_": "torchtune.training.metric_logging.WandBLogger"}
        path.write_text(json.dumps(about))
        (ledger_of(path.parent) / "rank-0.bin").unlink()
    with pytest.raises(ValueError, match=r"needs the package wandb.*: pip install wandb$"):
        merge([out], tmp_path / "whole")


def test_missing_doubled_foreign_and_damaged_parts_are_named(parts, tmp_path):
    one, two, three = (parts / "out" / f"part-{i}-of-3" for i in (1, 2, 3))
    twice = shutil.copytree(one, tmp_path / "twice")
    damaged = shutil.copytree(three, tmp_path / "damaged")
    change(ledger_of(damaged) / "rank-0.bin", lambda content: content[:-1])
    foreign = parts / "other" / "part-2-of-3"
    cases = {
        (one, three): "of 3 parts, 1 are missing: 2",
        (one, two, three, twice): f"part 1/3 in {twice} is there twice: also in {one}",
        (one, foreign, three): f"part 2/3 in {foreign} is of another evaluation than part 1/3 in {one}",
        (
            one,
            two,
            damaged,
        ): f"part 3/3 in {damaged} should hold the records of 13 windows between ",
        (tmp_path / "nothing",): "holds no finished part",
    }
    from ppl_eval.commands.merge import merge

    for folders, told in cases.items():
        with pytest.raises(ValueError, match=re.escape(told)):
            merge(folders, tmp_path / "out")
        assert not (tmp_path / "out" / "result.json").exists()


def test_a_part_that_was_killed_goes_on(killed, parts, tmp_path):  # noqa: F811
    """A finished part is found whole; one whose tail is torn scores only that again."""
    _, config = killed
    shutil.copytree(parts / "out" / "part-3-of-3", tmp_path / "part-3-of-3")
    change(ledger_of(tmp_path / "part-3-of-3") / "rank-0.bin", lambda content: content[:-1])
    finished = many(1, [["--config", str(config), f"output_dir={tmp_path}", "part=3/3"]], tmp_path)
    assert finished.code == 0, finished.output
    assert "resumed: 6 of 7 batches" in finished.output
