"""Ranks that differ, fail or are missing: found, named once, and nobody waits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.runs import TORCHRUN, run
from helpers.tiny import write_config
from ppl_eval.reports import find_problem

HELPER = str(Path(__file__).parent / "helpers" / "one_odd_rank.py")


def report(host="a", error=None, **facts):
    return {"host": host, "error": error, "facts": facts}


def test_no_problem():
    assert find_problem([report(seed="1"), report(seed="1")]) is None


def test_the_same_error_everywhere_is_said_once():
    assert find_problem([report(error="no such file"), report(error="no such file")]) == "no such file"


def test_errors_of_some_ranks_name_them():
    said = find_problem(
        [report(), report("b", error="disk full"), report("b", error="disk full"), report("b")]
    )
    assert said == "rank 1-2 on b: disk full"


def test_facts_that_differ_name_hosts_and_values():
    said = find_problem(
        [report(seed="1", data="x"), report("b", seed="2", data="x"), report("b", seed="2", data="x")]
    )
    assert said == "seed differs between ranks: 1 on a (rank 0); 2 on b (rank 1-2)"


def test_missing_ranks_are_named_with_those_that_came():
    said = find_problem([report(), None, report("b"), None])
    assert said == "rank 1, 3 did not come within timeout_seconds; there are a (rank 0), b (rank 2)"


@pytest.fixture
def config(tiny, tmp_path, private_home):
    return write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("fails", "error: injected on rank 1"),
        ("crashes", "RuntimeError: injected on rank 1"),
        ("other_seed", "config key seed differs between ranks: 42 on"),
        ("other_checkpoint", "checkpoint differs between ranks"),
    ],
)
def test_one_odd_rank_ends_the_job(config, tmp_path, odd, words):
    finished = run(
        TORCHRUN, "--standalone", "--nproc_per_node", "3", HELPER, odd, "--config", str(config), timeout=120
    )
    assert finished.code != 0
    assert finished.output.count(words) == 1, finished.output
    assert not (tmp_path / "out" / "result.json").exists()


def test_all_are_gone_soon_after_one_fails(config, tmp_path):
    """Without a launcher that would end them: plain processes with the variables of torchrun, one of which
    fails while others wait."""
    began = tmp_path / "failed_at"
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "WORLD_SIZE": "3",
        "FAILED_AT": str(began),
    }
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, HELPER, "fails", "--config", str(config)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert time.time() - began.stat().st_mtime < 15
    assert all(rank.returncode != 0 for rank in ranks)
    assert sum(output.count("injected on rank 1") for output in outputs) == 1, outputs


def test_a_missing_rank_is_named_after_the_timeout(config, tmp_path):
    env = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0",
    }  # fmt: skip
    finished = run(
        sys.executable,
        "-m",
        "distributed_ppl_eval",
        "--config",
        str(config),
        "timeout_seconds=3",
        env=env,
        timeout=90,
    )
    assert finished.code == 2
    assert "rank 1-2 did not come within timeout_seconds" in finished.output
