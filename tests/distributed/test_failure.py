"""Ranks that differ, fail or are missing: found, named once, and nobody waits."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.processes import free_port, rank_variables
from helpers.runs import TORCHRUN, ranks, run
from helpers.tiny import write_config, write_model, write_tokenizer
from ppl_eval.checkpoints.safetensors import SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS, sampled_sha256
from ppl_eval.distributed.agreement import find_problem
from ppl_eval.distributed.rendezvous import EXIT_BAD_INPUT

HELPERS = Path(__file__).parents[1] / "helpers"
ODD_RANK = str(HELPERS / "one_odd_rank.py")
# A rank that waits for another to come, or to answer, would outlive the deadline.
NO_TIMEOUT = "timeout_seconds=3600"
DEADLINE = 120


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
    [("fails", "injected on rank 1"), ("crashes", "RuntimeError: injected on rank 1")],
)
def test_one_odd_rank_ends_the_job(config, tmp_path, odd, words):
    job = [TORCHRUN, "--standalone", "--nproc_per_node", "3", ODD_RANK, odd, "--config", str(config)]
    finished = run(*job, NO_TIMEOUT, timeout=DEADLINE)
    assert finished.code != 0
    assert len(re.findall(rf"^error: .*{words}$", finished.output, re.MULTILINE)) == 1, finished.output
    # Under everything that torchrun prints.
    assert words in finished.output.splitlines()[-2], finished.output
    assert not (tmp_path / "out" / "result.json").exists()


def test_an_error_of_rank_0_while_its_neighbours_wait_for_it_ends_the_job(config, tmp_path):
    job = ["-m", "distributed_ppl_eval", "--config", str(config), "baseline=/no/such.json", NO_TIMEOUT]
    finished = ranks([job] * 3, tmp_path)
    assert all(finished.codes), finished.output
    assert finished.output.count("cannot read /no/such.json") == 1, finished.output


@pytest.fixture
def two_ranks(tiny, tmp_path, private_home):
    """Run two ranks that must find a mismatch before they work; returns what they print."""
    # What a path of the config holds may differ between nodes; every rank here is a node of its own.
    config = write_config(tmp_path / "config.yaml", Path("${oc.env:FOLDER}"), Path("${oc.env:TEXT}"))
    usual = {"FOLDER": str(tiny.folder), "TEXT": str(tiny.text)}

    def two_ranks(kind="normal", *overrides, both=(), mine=None, **other):
        argv = [ODD_RANK, kind, "--config", str(config), NO_TIMEOUT, *both]
        shared = {**usual, **(mine or {})}
        envs = [
            {**shared, "GROUP_RANK": "0", "LOCAL_RANK": "0"},
            {**shared, "GROUP_RANK": "1", "LOCAL_RANK": "0", **other},
        ]
        finished = ranks([argv, [*argv, *overrides]], tmp_path, envs)
        assert finished.codes == (EXIT_BAD_INPUT, EXIT_BAD_INPUT), finished.output
        return finished.output

    return two_ranks


@pytest.mark.parametrize(
    ("kind", "overrides", "fact", "values"),
    [
        ("torch_version", [], "torch version", (f'"{torch.__version__}"', '"1.0.0"')),
        ("normal", ["batch_size=3"], "config key batch_size", ("2", "3")),
        ("normal", ["seed=43"], "config key seed", ("42", "43")),
        ("backend", [], "backend", ('"gloo"', '"nccl"')),
    ],
    ids=["torch_version", "config", "seed", "backend"],
)
def test_a_mismatch_is_found_before_work(two_ranks, kind, overrides, fact, values):
    here = socket.gethostname()
    told = f"{fact} differs between ranks: {values[0]} on {here} (rank 0); {values[1]} on {here} (rank 1)"
    output = two_ranks(kind, *overrides)
    assert output.count(told) == 1, output


def test_another_text_under_the_same_path_is_found_before_work(two_ranks, tiny, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(tiny.text.read_text(encoding="utf-8") + "more", encoding="utf-8")
    output = two_ranks(TEXT=str(other))
    assert re.search(r"\bdata differs between ranks: {.*} on \S+ .rank 0.; {.*} on", output), output


def test_another_checkpoint_under_the_same_path_is_found_before_work(two_ranks, tiny, tmp_path):
    other = shutil.copytree(tiny.folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    output = two_ranks(FOLDER=str(other))
    assert re.search(r"\bcheckpoint differs between ranks: {.*} on \S+ .rank 0.; {.*} on", output), output


def test_another_config_json_is_found_before_work(two_ranks, tiny, tmp_path):
    other = shutil.copytree(tiny.folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "sliding_window": 16}))
    output = two_ranks(FOLDER=str(other))
    assert re.search(
        r"config.json differs between ranks: \"\w{64}\" on \S+ .rank 0.; \"\w{64}\" on", output
    ), output


@pytest.mark.parametrize(
    ("overrides", "other", "told"),
    [
        ([], {"MKL_CBWR": "COMPATIBLE"}, r'kernels differs between ranks: .*"COMPATIBLE"'),
        (
            ["dtype=${oc.env:DTYPE}"],
            {"DTYPE": "bf16"},
            'dtype differs between ranks: "fp32" on .*; "bf16" on ',
        ),
    ],
    ids=["kernels", "value_behind_a_variable"],
)
def test_what_decides_arithmetic_is_agreed_on(two_ranks, overrides, other, told):
    output = two_ranks(both=overrides, mine={"DTYPE": "fp32"}, **other)
    assert re.search(told, output), output


def test_weights_that_differ_where_no_sample_looks_are_found_before_scoring(two_ranks, tmp_path):
    """Zeroes in a place that neither the ends nor the sampled blocks of the file touch."""
    folders = [tmp_path / name for name in ("good", "bad")]
    sizes = {"embed_dim": 256, "intermediate_dim": 1024}
    for folder in folders:
        folder.mkdir()
        write_tokenizer(folder)
        write_model(folder, **sizes)
    bad = folders[1] / "model.safetensors"
    size = bad.stat().st_size
    with open(bad, "r+b") as file:
        file.seek(size * 30 // SAMPLE_BLOCKS + SAMPLE_BLOCK_BYTES + 64)
        file.write(bytes(size // SAMPLE_BLOCKS // 2))
    identities = [sampled_sha256(folder / "model.safetensors") for folder in folders]
    assert identities[0] == identities[1], "this test needs a difference that the samples miss"
    model = [f"model.{key}={value}" for key, value in sizes.items()]
    output = two_ranks(both=model, mine={"FOLDER": str(folders[0])}, FOLDER=str(folders[1]))
    here = socket.gethostname()
    told = rf"weights differ between ranks: \w{{32}} on {here} \(rank 0\); \w{{32}} on {here} \(rank 1\)"
    assert len(re.findall(told, output)) == 1, output
    assert not (tmp_path / "out" / "result.json").exists()


def plain_ranks(num_processes, *command):
    """Interpreters with the variables of torchrun, and no launcher that would keep the store or end them
    together. Returns their exit codes and outputs."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**env, **rank_variables(rank, num_processes)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE)[0] for rank in running]
    finally:
        for rank in running:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in running], outputs


def test_all_are_gone_soon_after_one_fails(config):
    codes, outputs = plain_ranks(3, ODD_RANK, "fails", "--config", str(config), NO_TIMEOUT)
    assert all(codes), outputs
    assert sum(output.count("injected on rank 1") for output in outputs) == 1, outputs


def test_all_end_well_though_rank_0_keeps_the_store(config):
    codes, outputs = plain_ranks(2, "-m", "distributed_ppl_eval", "--config", str(config))
    assert codes == [0, 0], outputs


def test_another_world_size_is_named_though_ranks_wait_for_different_numbers(config, tmp_path):
    """Rank 0 would wait for a rank 2 that never comes."""
    job = ["-m", "distributed_ppl_eval", "--config", str(config), NO_TIMEOUT]
    finished = ranks([job] * 2, tmp_path, [{"WORLD_SIZE": "3"}, {"WORLD_SIZE": "2"}])
    assert all(finished.codes), finished.output
    (told,) = re.findall(r"world size differs between ranks: (.*)", finished.output)
    assert "3 on rank 0" in told
    assert "2 on rank 1" in told


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("1", "rank 1 did not come within timeout_seconds; there are {host} (rank 0, 2)"),
        ("0", "rank 0 did not come within timeout_seconds; rank"),
    ],
)
def test_a_missing_rank_is_named_after_the_timeout(config, tmp_path, absent, words):
    argv = [ODD_RANK, "absent", "--config", str(config), "timeout_seconds=3"]
    finished = ranks([argv] * 3, tmp_path, [{"ODD": absent}] * 3)
    assert [rank for rank in range(3) if not finished.codes[rank]] == [int(absent)]
    assert finished.output.count(words.format(host=socket.gethostname())) == 1, finished.output
