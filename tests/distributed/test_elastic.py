"""Restarts over several nodes: torchrun starts the ranks again, and what was scored is not scored again."""

import json
import random
import sys
import time
from pathlib import Path

import pytest

from helpers.agents import agents
from helpers.runs import TORCHRUN, many, result_of, run
from helpers.tiny import write_config
from ppl_eval.commands.launch import OWN_STORES

HELPERS = Path(__file__).parents[1] / "helpers"
FAULTY_RUN, HELD_RUN = str(HELPERS / "faulty_run.py"), str(HELPERS / "held_run.py")
NUM_WINDOWS = 37
BATCHES_HELD = 2


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    return write_config(
        folder / "config.yaml", tiny.folder, tiny.text, max_windows=NUM_WINDOWS, timeout_seconds=10
    )


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """``nll_sum_hex`` of an undisturbed run."""
    folder = tmp_path_factory.mktemp("alone")
    finished = many(1, [["--config", str(config), f"output_dir={folder}"]], folder)
    assert finished.code == 0, finished.output
    return result_of(folder)["nll_sum_hex"]


def faults(tmp_path, **fault):
    fault["once"] = str(tmp_path / "once")
    return {"FAULT": json.dumps(fault), "SCORED": str(tmp_path / "scored")}


def assert_scored_once(tmp_path, alone, at_least):
    """The same bits, from records of which none was made twice."""
    result = result_of(tmp_path / "out")
    assert result["nll_sum_hex"] == alone
    assert result["plan"]["resumed_batches"] >= at_least
    assert (tmp_path / "once").exists()
    assert sorted(map(int, (tmp_path / "scored").read_text().split())) == list(range(NUM_WINDOWS))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_a_killed_rank_starts_the_run_again_on_all_nodes(config, alone, tmp_path, private_home, seed):
    dice = random.Random(seed)
    ranks_each = 1 if seed == 0 else dice.choice([1, 2])
    batches = dice.randrange(1, 1 + 18 // (2 * ranks_each))
    env = faults(tmp_path, rank=dice.randrange(2 * ranks_each), batches=batches, signal="SIGKILL")
    options = ["--nnodes", "2", "--nproc_per_node", str(ranks_each), "--max_restarts", "1"]
    with agents(tmp_path, env) as nodes:
        for _ in range(2):
            nodes.start(
                TORCHRUN, *options, FAULTY_RUN, "--config", str(config), f"output_dir={tmp_path / 'out'}"
            )
        assert nodes.wait([0, 1], 240) == [0, 0], nodes.output()
    assert_scored_once(tmp_path, alone, at_least=batches)


@pytest.mark.slow
def test_launch_starts_a_killed_rank_again(config, alone, tmp_path, private_home):
    """`ppl-eval launch` on one host, on its own loopback rendezvous."""
    env = faults(tmp_path, rank=1, batches=4, signal="SIGKILL")
    command = [
        "-m",
        "ppl_eval.commands.one_host",
        "--nproc_per_node",
        "2",
        "--max_restarts",
        "1",
        "faulty_run",
    ]
    argv = ["--config", str(config), f"output_dir={tmp_path / 'out'}"]
    done = run(sys.executable, *command, *argv, env={**env, "PYTHONPATH": str(HELPERS)})
    assert done.code == 0, done.output
    assert_scored_once(tmp_path, alone, at_least=4)


def wait_for_batches(held, ranks, nodes):
    """Wait until ranks have scored their batches of this start and stand still."""
    files = [held.with_name(f"{held.name}.{rank}") for rank in ranks]
    give_up = time.monotonic() + 180
    while not all(file.exists() for file in files):
        assert time.monotonic() < give_up, nodes.output()
        time.sleep(0.1)
    for file in files:
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [0, 1])
@pytest.mark.parametrize("whole", [True, False], ids=["node", "launcher"])
def test_a_node_leaves_the_rest_go_on_and_it_comes_back(config, alone, tmp_path, private_home, leaves, whole):
    """Elastic `--nnodes 1:2`; the node that leaves loses its launcher, or all that runs on it, to kill -9."""
    held, go = tmp_path / "held", tmp_path / "go"
    env = {
        "HOLD_AFTER": str(BATCHES_HELD),
        "HELD": str(held),
        "GO": str(go),
        "PET_RDZV_CONF": "last_call_timeout=5,keep_alive_interval=1",
        OWN_STORES: "1",
    }
    command = [TORCHRUN, "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3", HELD_RUN]
    command += ["--config", str(config), f"output_dir={tmp_path / 'out'}"]
    with agents(tmp_path, env, endpoint_stays=True) as nodes:
        for node in range(2):
            nodes.start(*command, address=1 + node)
        wait_for_batches(held, [0, 1], nodes)
        if whole:
            nodes.kill(leaves)
        else:
            nodes.running[leaves].kill()
        wait_for_batches(held, [0], nodes)
        back = nodes.start(*command, address=1 + leaves)
        wait_for_batches(held, [0, 1], nodes)
        go.touch()
        assert nodes.wait([1 - leaves, back], 120) == [0, 0], nodes.output()
    result = result_of(tmp_path / "out")
    assert result["nll_sum_hex"] == alone
    assert result["plan"]["resumed_batches"] == 3 * BATCHES_HELD
    assert result["parallel"]["world_size"] == 2
