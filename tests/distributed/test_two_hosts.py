"""Two hosts with a network between them: the same numbers as on one, and an end when the cable is cut."""

import json
import os
import signal
from pathlib import Path

import pytest

from helpers import two_hosts
from helpers.runs import PPL_EVAL, many, result_of
from helpers.tiny import MODEL, write_config, write_model, write_tokenizer
from ppl_eval.results.ledger import read_ledger

HELPERS = Path(__file__).parents[1] / "helpers"
HELD_RUN, MANY_RUNS = str(HELPERS / "held_run.py"), str(HELPERS / "many_runs.py")
TIMEOUT_SECONDS = 10
# What the promise allows beyond timeout_seconds until nothing is left.
GRACE_SECONDS = 15
SHARDED = "data_parallel_shard_dim=-1"
TWO_AND_ONE = {"dp": [], "dp_by_node": ["aggregation.topology=hierarchical"], "fsdp": [SHARDED]}
TWO_AND_TWO = {
    **TWO_AND_ONE,
    "hsdp": [SHARDED, "data_parallel_replicate_dim=2", "aggregation.topology=hierarchical"],
}

WHY_NOT = two_hosts.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture
def hosts():
    with two_hosts.two_hosts() as hosts:
        yield hosts


@pytest.fixture
def config(tiny, tmp_path, private_home):
    # 13 windows in 7 batches: no number of ranks divides them.
    return write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=13)


def across(hosts, config, scratch, nproc_per_node, cases):
    """Results of the cases on two hosts, by name."""
    argvs = [
        ["--config", str(config), *overrides, f"output_dir={scratch / name}"]
        for name, overrides in cases.items()
    ]
    jobs = scratch / "jobs.json"
    jobs.write_text(json.dumps(argvs))
    hosts.launch(nproc_per_node, MANY_RUNS, str(jobs))
    outputs = hosts.finish(timeout=400)
    assert [agent.returncode for agent in hosts.agents] == [0, 0], "\n".join(outputs)
    results = {name: result_of(scratch / name) for name in cases}
    for result in results.values():
        assert result["parallel"]["world_size"] == sum(nproc_per_node)
        assert result["parallel"]["num_nodes"] == 2
    return results


def one_process(config, scratch):
    finished = many(1, [["--config", str(config), f"output_dir={scratch / 'alone'}"]], scratch)
    assert finished.code == 0, finished.output
    return result_of(scratch / "alone")


def numbers(result):
    return result["nll_sum_hex"], result["num_tokens"], result["coverage"]["sha256"]


@pytest.mark.parametrize(
    ("nproc_per_node", "cases"),
    [((2, 1), TWO_AND_ONE), pytest.param((2, 2), TWO_AND_TWO, marks=pytest.mark.slow)],
    ids=["2+1", "2+2"],
)
def test_the_same_bits_as_on_one_host(hosts, config, tmp_path, nproc_per_node, cases):
    alone = one_process(config, tmp_path)
    results = across(hosts, config, tmp_path, nproc_per_node, cases)
    assert {name: numbers(result) for name, result in results.items()} == dict.fromkeys(cases, numbers(alone))
    for name, result in results.items():
        assert ("hierarchical" in str(cases[name])) == (result["aggregation"]["topology"] == "hierarchical")


@pytest.mark.slow
def test_tensor_parallel_across_the_cable(hosts, config, tmp_path):
    """One rank a host, started by `ppl-eval launch`."""
    alone = one_process(config, tmp_path)
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_endpoint", two_hosts.ENDPOINT]
    recipe = ["--config", str(config), "tensor_parallel_dim=2", f"output_dir={tmp_path / 'split'}"]
    hosts.start([(PPL_EVAL, "launch", *options, "--", *recipe)] * 2, {})
    outputs = hosts.finish(timeout=300)
    assert [agent.returncode for agent in hosts.agents] == [0, 0], "\n".join(outputs)
    split = result_of(tmp_path / "split")
    assert (split["parallel"]["tp"], split["parallel"]["num_nodes"]) == (2, 2)
    assert split["coverage"] == alone["coverage"]
    assert split["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("nproc_per_node", [(2, 1), (2, 2)], ids=["2+1", "2+2"])
def test_tensor_parallel_over_all_ranks_of_two_hosts(hosts, tiny, tmp_path, private_home, nproc_per_node):
    sizes = {"num_heads": 12, "num_kv_heads": 12, "embed_dim": 96, "intermediate_dim": 144}
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    write_model(folder, **sizes)
    config = write_config(
        tmp_path / "config.yaml", folder, tiny.text, max_windows=13, model={**MODEL, **sizes}
    )
    alone = one_process(config, tmp_path)
    split = across(
        hosts, config, tmp_path, nproc_per_node, {"tp": [f"tensor_parallel_dim={sum(nproc_per_node)}"]}
    )["tp"]
    assert split["parallel"]["tp"] == sum(nproc_per_node)
    assert split["coverage"] == alone["coverage"]
    assert split["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6)


@pytest.fixture
def in_the_middle(hosts, config, tmp_path):
    """Starts 2 + 1 ranks and returns when each of them has scored two batches and waits."""

    def start(*overrides):
        env = {"HOLD_AFTER": "2", "HELD": str(tmp_path / "held"), "GO": str(tmp_path / "go")}
        argv = ["--config", str(config), f"timeout_seconds={TIMEOUT_SECONDS}", *overrides]
        agents = hosts.launch((2, 1), HELD_RUN, *argv, env=env)
        two_hosts.wait_for([tmp_path / f"held.{rank}" for rank in range(3)], agents)
        return tmp_path / "go"

    return start


def assert_all_end(hosts, go):
    """Lets the ranks go on; what each host printed until nothing was left of it."""
    go.touch()
    outputs = hosts.finish(timeout=TIMEOUT_SECONDS + GRACE_SECONDS)
    assert hosts.pids(0) == hosts.pids(1) == []
    assert all(agent.returncode != 0 for agent in hosts.agents)
    return outputs


@pytest.mark.parametrize(
    "overrides", [[], pytest.param([SHARDED], marks=pytest.mark.slow)], ids=["dp", "fsdp"]
)
def test_all_end_when_the_cable_is_cut(hosts, in_the_middle, tmp_path, overrides):
    go = in_the_middle(*overrides)
    hosts.cut()
    on_a, on_b = assert_all_end(hosts, go)
    assert "host host-b (rank 2) cannot be reached" in on_a
    assert "host host-a (rank 0-1), which keeps the rendezvous store" in on_b
    assert not (tmp_path / "out" / "result.json").exists()

    (folder,) = (tmp_path / "out" / "ledger").iterdir()
    # Each rank had finished two batches of two windows when the cable was cut.
    assert len(read_ledger(folder)) >= 12
    assert sorted(path.name for path in folder.glob("rank-*.bin")) == [
        f"rank-{rank}.bin" for rank in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], [SHARDED]], ids=["dp", "fsdp"])
def test_all_end_when_a_host_loses_its_power(hosts, in_the_middle, overrides):
    go = in_the_middle(*overrides)
    hosts.kill(1)
    on_a, _ = assert_all_end(hosts, go)
    assert "host host-b (rank 2) cannot be reached" in on_a


@pytest.mark.slow
def test_all_end_when_the_only_rank_of_a_host_is_stopped(hosts, in_the_middle):
    """Nobody on its host could end it, and its launcher would wait."""
    go = in_the_middle()
    os.kill(rank_of(hosts, 1), signal.SIGSTOP)
    on_a, _ = assert_all_end(hosts, go)
    assert "host host-b (rank 2) cannot be reached: nothing was heard for" in on_a


def rank_of(hosts, host):
    """The only process of a host that has a rank."""
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in hosts.pids(host)}
    (pid,) = (pid for pid, environment in environments.items() if b"\0LOCAL_RANK=" in environment)
    return pid


@pytest.mark.slow
def test_all_end_when_the_launcher_that_keeps_the_store_is_killed(hosts, in_the_middle):
    go = in_the_middle()
    hosts.agents[0].kill()
    on_a, on_b = assert_all_end(hosts, go)
    assert "the launcher of host-a" in on_a or "the rendezvous store at" in on_a
    # Its own launcher may notice first, and then ends the ranks before they can tell.
    store = "host host-a (rank 0-1), which keeps the rendezvous store"
    assert store in on_b or "connection to the C10d store has failed" in on_b, on_b
