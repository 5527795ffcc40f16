"""Parts without a process group of the others, and their merge to the result of one run."""

import json
import re
import shutil

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
        ): f"part 3/3 in {damaged} should hold the records of the windows 24 to 36, and 1 of",
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
