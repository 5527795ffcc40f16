"""`ppl-eval launch`: the command and the rendezvous it sets, and what it refuses before anyone waits."""

import os

import pytest

from helpers.readme import two_node_lines
from ppl_eval.commands import cli, launch

CONFIG = ["--config", "smollm2/135M_ppl", "batch_size=4"]


@pytest.fixture
def started(monkeypatch):
    """What `launch` would become: argv and environment."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: calls.append((argv, env)))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return calls


def test_two_nodes_are_the_lines_of_the_readme(started):
    rendezvous = ["--rdzv_endpoint", "node0:29500", "--rdzv_id", "ppl-1"]
    cli.main(["launch", "--nnodes", "2", "--nproc_per_node", "8", *rendezvous, "--", *CONFIG])
    ((argv, env),) = started
    exports, line = two_node_lines()
    assert {name: env[name] for name in exports} == exports
    assert os.path.basename(argv[0]) == "tune"
    assert os.access(argv[0], os.X_OK)
    assert argv[-3:] == CONFIG
    options = " ".join(argv[2 : argv.index("distributed_ppl_eval")])
    assert set(options.split()) == set(line.split("distributed_ppl_eval")[0].split()) - {"tune", "run"}


def test_one_node_needs_no_rendezvous(started):
    cli.main(["launch", "--nproc_per_node", "gpu", "--", *CONFIG])
    ((argv, env),) = started
    assert argv[1:] == ["run", "--nproc_per_node", "gpu", "distributed_ppl_eval", *CONFIG]
    assert not any(name.startswith("PET_") for name in env)


def test_endpoint_may_come_from_the_environment(started, monkeypatch):
    monkeypatch.setenv(launch.ENDPOINT, "node7:1234")
    cli.main(["launch", "--nnodes", "2", "--", *CONFIG])
    assert started[0][1]["PET_RDZV_ENDPOINT"] == "node7:1234"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2", "--", *CONFIG], "needs --rdzv_endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv_endpoint", "node0", "--", *CONFIG], "must be HOST:PORT"),
        (["--nnodes", "2", "--rdzv_endpoint", "localhost:29500", "--", *CONFIG], "own name for itself"),
        (["--nnodes", "0", "--", *CONFIG], "at least 1"),
        (["--nproc_per_node", "2", "--", "--config", "smollm2/136M_ppl"], "no config is called"),
        (["--nproc_per_node", "2", "--", *CONFIG, "batchsize=3"], "unknown key 'batchsize'"),
    ],
)
def test_refused_before_anyone_waits(started, capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        cli.main(["launch", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
    assert started == []
