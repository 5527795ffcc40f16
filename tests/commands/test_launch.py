"""`ppl-eval launch`: the command and the rendezvous it sets, and what it refuses before anyone waits."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.readme import two_node_lines
from helpers.runs import PPL_EVAL, TORCHRUN, result_of, run
from helpers.tiny import write_config
from helpers.two_hosts import wait_for
from ppl_eval.commands import cli, launch
from ppl_eval.distributed.outcome import EXIT_BAD_INPUT

HELPERS = Path(__file__).parents[1] / "helpers"

OTHERS = [pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP)]
CONFIG = ["--config", "smollm2/135M_ppl", "batch_size=4"]


@pytest.fixture
def started(monkeypatch):
    """What `launch` would start: argv and environment."""
    calls = []
    monkeypatch.setattr(cli, "start", lambda launch: calls.append((launch.command, launch.environment)))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return calls


def launch_here(*arguments):
    with pytest.raises(SystemExit):
        cli.main(["launch", *arguments])


def test_two_nodes_are_the_lines_of_the_readme(started):
    rendezvous = ["--rdzv_endpoint", "node0:29500", "--rdzv_id", "ppl-1"]
    launch_here("--nnodes", "2", "--nproc_per_node", "8", *rendezvous, "--", *CONFIG)
    ((argv, env),) = started
    exports, line = two_node_lines()
    assert {name: env[name] for name in exports} == exports
    assert os.path.basename(argv[0]) == "tune"
    assert os.access(argv[0], os.X_OK)
    assert argv[-3:] == CONFIG
    options = " ".join(argv[2 : argv.index("distributed_ppl_eval")])
    assert set(options.split()) == set(line.split("distributed_ppl_eval")[0].split()) - {"tune", "run"}


def test_one_node_needs_no_rendezvous(started):
    launch_here("--nproc_per_node", "gpu", "--", *CONFIG)
    ((argv, env),) = started
    module = ["-m", "ppl_eval.commands.one_host"]
    assert argv[1:] == [*module, "--nproc_per_node", "gpu", "distributed_ppl_eval", *CONFIG]
    assert not any(name.startswith("PET_") for name in env)


def test_nodes_that_may_come_and_go_have_stores_of_their_own(started):
    nodes = ["--nnodes", "1:2", "--max_restarts", "3", "--rdzv_endpoint", "node0:29500"]
    launch_here(*nodes, "--", *CONFIG)
    launch_here("--nnodes", "2", *nodes[2:], "--", *CONFIG)
    (elastic, own_stores), (_, shared) = started
    options = "--nnodes 1:2 --nproc_per_node 1 --max_restarts 3 distributed_ppl_eval"
    assert options in " ".join(elastic)
    assert own_stores[launch.OWN_STORES] == "1"
    assert launch.OWN_STORES not in shared


def test_endpoint_may_come_from_the_environment(started, monkeypatch):
    monkeypatch.setenv(launch.ENDPOINT, "node7:1234")
    launch_here("--nnodes", "2", "--", *CONFIG)
    assert started[0][1]["PET_RDZV_ENDPOINT"] == "node7:1234"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2", "--", *CONFIG], "needs --rdzv_endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv_endpoint", "node0", "--", *CONFIG], "must be HOST:PORT"),
        (["--nnodes", "2", "--rdzv_endpoint", "localhost:29500", "--", *CONFIG], "own name for itself"),
        (["--nnodes", "0", "--", *CONFIG], "at least 1"),
        (["--nnodes", "2:1", "--", *CONFIG], "--nnodes is '2:1'"),
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


def test_one_host_listens_on_loopback_only(tiny, tmp_path, private_home):
    seen = tmp_path / "seen.json"
    section = {"_component_": "helpers.listeners.Listening", "sizes": [200, 99], "remark": str(seen)}
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, dataset=section)
    arguments = ["--config", str(config), "allow_components=helpers"]
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = run(PPL_EVAL, "launch", "--nproc_per_node", "2", "--", *arguments, env=env)
    assert done.code == 0, done.output
    addresses = json.loads(seen.read_text())
    assert addresses
    assert set(addresses) == {"127.0.0.1"}
    assert result_of(tmp_path / "out")["num_windows"] == 4
    # torchrun's own store is what the launcher is there to avoid, and this test can see it.
    command = [TORCHRUN, "--standalone", "--nproc_per_node", "2", "-m", "distributed_ppl_eval", *arguments]
    seen.unlink()
    done = run(*command, env=env | {"PPL_EVAL_HOME": str(tmp_path / "other")})
    assert done.code == 0, done.output
    assert "::" in json.loads(seen.read_text())


def test_the_recipe_s_exit_code_and_the_cause_come_last(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    job = ["--nproc_per_node", "2", "--", "--config", str(config), "baseline=/no/such.json"]
    done = run(PPL_EVAL, "launch", *job)
    assert done.code == EXIT_BAD_INPUT, done.output
    why = f"baseline: cannot read /no/such.json: {os.strerror(errno.ENOENT)}"
    assert done.output.splitlines()[-1] == f"error: rank 0 on {socket.gethostname()}: {why}"
    assert "Traceback" not in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHERS])
def test_signals_reach_the_ranks_and_the_exit_code_names_them(tiny, tmp_path, private_home, number):
    held, go = tmp_path / "held", tmp_path / "go"
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    # A rank that is held sits in a pipe's read, where Python runs no handler.
    env = {"HOLD_AFTER": "2", "HELD": str(held), "GO": str(go), "PYTHONPATH": str(HELPERS)}
    command = [PPL_EVAL, "launch", "--nproc_per_node", "2", "--", "--config", str(config)]
    launcher = launch.prepare("1", "2", None, "ppl_eval", command[5:])
    held_run = [word if word != "distributed_ppl_eval" else "held_run" for word in launcher.command]
    start = (
        "import sys; from ppl_eval.commands.launch import Launch, start; sys.exit(start(Launch({}, {}, 60)))"
    )
    script = start.format(held_run, launcher.environment)
    with open(tmp_path / "output", "w+") as output:
        running = subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, **env}, stdout=output, stderr=output
        )
        wait_for([Path(f"{held}.{rank}") for rank in range(2)], [])
        running.send_signal(number)
        assert running.wait(60) == 128 + number
        output.seek(0)
        everything = output.read()
    last = everything.splitlines()[-1]
    assert "Traceback" not in everything
    assert last.startswith("error: ")
    assert number.name in last
