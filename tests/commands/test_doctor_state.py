"""`ppl-eval doctor state`: a run that goes on, is killed, goes on again and is done; folders of others."""

import json
import os
import signal
import time

import pytest

from helpers.runs import many
from helpers.tiny import TEXT, write_config
from ppl_eval.commands.cli import main
from ppl_eval.results.status import read_statuses
from results.test_resume import ledger_of, start_held

WINDOWS = 24


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    os.environ["PPL_EVAL_HOME"] = str(folder / "home")
    yield write_config(
        folder / "config.yaml", tiny.folder, text, max_windows=WINDOWS, batch_size=2, schedule="static"
    )
    del os.environ["PPL_EVAL_HOME"]


def state_of(folder, capsys):
    """Exit code, and what was found by what was looked at."""
    code = called("doctor", "state", str(folder), "--json")
    return code, {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}


def called(*argv):
    """The exit code of the command."""
    try:
        main(argv)
    except SystemExit as ended:
        return ended.code
    return 0


def wait_for_phase(out, phase):
    """Wait until the file of the host says that all ranks are in a phase."""
    deadline = time.monotonic() + 60
    while True:
        hosts, _ = read_statuses(out)
        if hosts and all(about.get("phase") == phase for about in hosts[0].ranks.values()):
            return
        assert time.monotonic() < deadline, hosts
        time.sleep(0.1)


def line_of(findings, start):
    (line,) = (finding for what, finding in findings.items() if what.startswith(start))
    return line


def test_a_run_that_goes_on_is_killed_and_goes_on(config, tmp_path, capsys):
    out = tmp_path / "out"
    held = start_held(config, tmp_path, 2, f"output_dir={out}")
    try:
        # A host writes what its ranks do every two seconds; they stand still by now.
        wait_for_phase(out, "scoring")
        code, found = state_of(out, capsys)
        assert code == 0, found
        assert found["state"]["found"] == "running, 2 rank(s) on 1 host(s)"
        assert line_of(found, "progress")["found"].startswith(f"12 of {WINDOWS} windows (50%)")
        assert line_of(found, "rank 0")["found"].startswith("phase 'scoring'")
        assert found["if it ended now, resume"]["found"] == "goes on from 6 of 12 batches of the plan"
    finally:
        for rank in held:
            rank.kill()

    code, found = state_of(out, capsys)
    assert code == 1
    assert "is gone without a word" in found["state"]["found"]
    assert found["resume"]["found"] == "goes on from 6 of 12 batches of the plan"

    # A record that was torn, and one that lost its batch.
    path = ledger_of(out) / "rank-0.bin"
    path.write_bytes(path.read_bytes()[:-5])
    code, found = state_of(out, capsys)
    assert line_of(found, f"ledger {ledger_of(out).name}: rank-0.bin")["remedy"] == ""
    assert found["resume"]["found"] == (
        "goes on from 5 of 12 batches of the plan; 1 windows of unfinished batches are scored again"
    )

    again = many(1, [["--config", str(config), f"output_dir={out}"]], tmp_path)
    assert again.code == 0, again.output
    code, found = state_of(out, capsys)
    assert code == 0
    assert found["state"]["found"].startswith("finished: perplexity ")
    assert not (out / "status").exists()


def test_a_run_that_says_why_it_ended_sends_nobody_to_dmesg(config, tmp_path, capsys):
    out = tmp_path / "out"
    (held,) = start_held(config, tmp_path, 1, f"output_dir={out}")
    os.kill(held.pid, signal.SIGTERM)
    assert held.wait(60) == 128 + signal.SIGTERM, held.output()
    code, found = state_of(out, capsys)
    assert code == 1
    assert f"(exit code {128 + signal.SIGTERM})" in found["state"]["found"]
    assert line_of(found, "rank 0")["remedy"] == ""
    assert found["resume"]["found"] == "goes on from 3 of 12 batches of the plan"


def test_folders_that_no_run_wrote(tmp_path, capsys):
    assert called("doctor", "state", str(tmp_path / "absent")) == 2
    assert "is no folder" in capsys.readouterr().err
    assert called("doctor", "state", str(tmp_path)) == 2
    assert "is not the output_dir of a run" in capsys.readouterr().err


def test_a_damaged_status_file_is_named(tmp_path, capsys):
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "a-0.json").write_text('{"version": 1}')
    code, found = state_of(tmp_path, capsys)
    assert code == 1
    assert "a-0.json" in found["status file"]["found"]
