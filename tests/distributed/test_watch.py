"""Ranks that get stuck or are killed in the middle of a run: named within timeout_seconds and 15 s.

tests/recipe/test_faults.py has more signals, at any moment.
"""

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from helpers.runs import finish, running_ranks, the_error
from helpers.tiny import write_config
from helpers.two_hosts import wait_for
from ppl_eval.results.status import read_statuses

HELD_RUN = str(Path(__file__).parents[1] / "helpers" / "held_run.py")
HERE = socket.gethostname()
TIMEOUT_SECONDS = 6
GRACE_SECONDS = 15
SHARDED = "data_parallel_shard_dim=-1"


@pytest.fixture
def config(tiny, tmp_path, private_home):
    return write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=13)


@pytest.fixture
def held(config, tmp_path):
    """Start ranks, and go on when each has scored two batches and waits for the file ``go``."""

    def start(num_ranks, *overrides, stuck=None):
        env = {"HOLD_AFTER": "2", "HELD": str(tmp_path / "held"), "GO": str(tmp_path / "go")}
        if stuck is not None:
            env["STUCK"] = str(stuck)
        argv = [HELD_RUN, "--config", str(config), f"timeout_seconds={TIMEOUT_SECONDS}", *overrides]
        return running_ranks([argv] * num_ranks, tmp_path, [env] * num_ranks)

    return start


def all_held(running, tmp_path):
    """Wait until every rank is held, and its beats say so."""
    num_ranks = len(running)
    wait_for([tmp_path / f"held.{rank}" for rank in range(num_ranks)], running)
    told: dict[int, dict] = {}
    while len(told) < num_ranks or any(about["window"] is None for about in told.values()):
        time.sleep(0.05)
        hosts, damaged = read_statuses(tmp_path / "out")
        assert not damaged
        told = hosts[0].ranks if hosts else {}


@pytest.mark.parametrize(
    ("stuck", "overrides"),
    [(1, []), pytest.param(0, [SHARDED], marks=pytest.mark.slow)],
)
def test_a_rank_that_is_stuck_in_a_read_is_named(held, tmp_path, stuck, overrides):
    with held(2, *overrides, stuck=stuck) as (running, _):
        all_held(running, tmp_path)
        (tmp_path / "go").touch()
        finished = finish(running, TIMEOUT_SECONDS + GRACE_SECONDS)
    assert all(finished.codes)
    error = the_error(finished)
    assert re.match(
        rf"rank {stuck} on {HERE} makes no progress: nothing was done for \d+ s"
        r" \(phase 'scoring', last finished window \d+\), at .*held_run.py:\d+ in append_and_hold",
        error,
    ), error


def test_a_killed_rank_is_named_long_before_the_timeout(held, tmp_path):
    with held(2, "timeout_seconds=3600") as (running, _):
        all_held(running, tmp_path)
        os.kill(running[1].pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        finished = finish(running, 30)
    assert all(finished.codes)
    error = the_error(finished)
    assert error.startswith(f"rank 1 on {HERE} is gone without a word (phase 'scoring', last"), error


def test_a_removed_output_dir_is_noticed_with_the_next_batch(held, tmp_path):
    with held(1) as (running, _):
        all_held(running, tmp_path)
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "go").touch()
        finished = finish(running, 30)
    assert finished.codes == (2,)
    error = the_error(finished)
    assert re.match(r"the records .* cannot be written to .*/out/.*: it was removed while the run", error)
