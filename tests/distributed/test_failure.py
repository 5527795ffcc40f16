"""Ranks that differ, fail or are missing: found, named once, and nobody waits."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.runs import TORCHRUN, run
from helpers.tiny import write_config
from ppl_eval.distributed.agreement import find_problem

HELPERS = Path(__file__).parents[1] / "helpers"
ODD_RANK, ODD_RANKS = str(HELPERS / "one_odd_rank.py"), str(HELPERS / "odd_ranks.py")
KINDS = ("torch_version", "config", "seed", "backend", "checkpoint", "data")


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
    [("fails", "error: injected on rank 1"), ("crashes", "RuntimeError: injected on rank 1")],
)
def test_one_odd_rank_ends_the_job(config, tmp_path, odd, words):
    finished = run(
        TORCHRUN, "--standalone", "--nproc_per_node", "3", ODD_RANK, odd, "--config", str(config), timeout=120
    )
    assert finished.code != 0
    assert finished.output.count(words) == 1, finished.output
    assert not (tmp_path / "out" / "result.json").exists()


def test_an_error_of_rank_0_while_its_neighbours_wait_for_it_ends_the_job(config, tmp_path):
    job = [TORCHRUN, "--standalone", "--nproc_per_node", "3", "-m", "distributed_ppl_eval"]
    finished = run(*job, "--config", str(config), "baseline=/no/such.json", timeout=60)
    assert finished.code != 0
    assert finished.output.count("cannot read /no/such.json") == 1, finished.output


def test_a_mismatch_of_each_kind_is_found_before_work(tiny, tmp_path, private_home):
    other = tmp_path / "other.txt"
    other.write_text(tiny.text.read_text(encoding="utf-8") + "more", encoding="utf-8")
    text = Path("${oc.env:TEXT}")
    config = write_config(tmp_path / "config.yaml", tiny.folder, text)
    env = {"TEXT": str(tiny.text), "OTHER_TEXT": str(other)}
    finished = run(
        TORCHRUN, "--standalone", "--nproc_per_node", "2", ODD_RANKS, "--config", str(config), env=env
    )
    assert finished.code == 0, finished.output
    here = socket.gethostname()
    for fact, values in {
        "torch version": (f'"{torch.__version__}"', '"1.0.0"'),
        "config key batch_size": ("2", "3"),
        "config key seed": ("42", "43"),
        "backend": ('"gloo"', '"nccl"'),
    }.items():
        told = f"{fact} differs between ranks: {values[0]} on {here} (rank 0); {values[1]} on {here} (rank 1)"
        assert finished.output.count(told) == 1, finished.output
    for fact in ("checkpoint", "data"):
        assert len(
            re.findall(f"{fact} differs between ranks: {{.*}} on {here} .rank 0.; {{.*}} on", finished.output)
        )
    ends = re.findall(r"(\w+): rank (\d) stopped with 2 after (\S+) s", finished.output)
    assert sorted((kind, rank) for kind, rank, _ in ends) == sorted((kind, r) for kind in KINDS for r in "01")
    # The promise; a run that waits for the other rank takes timeout_seconds, which is 180.
    assert max(float(seconds) for *_, seconds in ends) < 20


class PlainRanks:
    """Processes with the variables of torchrun, and no launcher that would end them together."""

    def __init__(self, world_sizes, *command, **env):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, world_size in enumerate(world_sizes)
        ]
        self.outputs = [rank.communicate(timeout=120)[0] for rank in self.ranks]


def test_all_are_gone_soon_after_one_fails(config, tmp_path):
    began = tmp_path / "failed_at"
    job = PlainRanks([3, 3, 3], ODD_RANK, "fails", "--config", str(config), FAILED_AT=str(began))
    assert time.time() - began.stat().st_mtime < 15
    assert all(rank.returncode != 0 for rank in job.ranks)
    assert sum(output.count("injected on rank 1") for output in job.outputs) == 1, job.outputs


def test_all_end_well_though_rank_0_keeps_the_store(config):
    job = PlainRanks([2, 2], "-m", "distributed_ppl_eval", "--config", str(config))
    assert [rank.returncode for rank in job.ranks] == [0, 0], job.outputs


def test_another_world_size_is_named_though_ranks_wait_for_different_numbers(config):
    """Rank 0 would wait for a rank 2 that never comes."""
    job = PlainRanks([3, 2], "-m", "distributed_ppl_eval", "--config", str(config))
    assert all(rank.returncode != 0 for rank in job.ranks)
    (told,) = re.findall(r"world size differs between ranks: (.*)", "\n".join(job.outputs))
    assert "3 on rank 0" in told
    assert "2 on rank 1" in told


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("1", "rank 1 did not come within timeout_seconds; there are {host} (rank 0, 2)"),
        ("0", "rank 0 did not come within timeout_seconds; rank"),
    ],
)
def test_a_missing_rank_is_named_after_the_timeout(config, absent, words):
    argv = ["absent", "--config", str(config), "timeout_seconds=3"]
    finished = run(
        *(TORCHRUN, "--standalone", "--nproc_per_node", "3", ODD_RANK, *argv),
        env={"ODD": absent},
        timeout=120,
    )
    assert finished.code != 0
    assert finished.output.count(words.format(host=socket.gethostname())) == 1, finished.output
