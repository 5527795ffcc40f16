"""Runs that die and go on: the same bits in every figure and file, whoever scores the rest."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from helpers.processes import Script, rank_variables
from helpers.runs import TORCHRUN, many, ranks, result_of, run
from helpers.tiny import TEXT, write_config
from helpers.two_hosts import wait_for
from ppl_eval.metrics.window_records import record_dtype
from ppl_eval.results import ledger, resume
from ppl_eval.results.ledger import read_ledger
from results.test_ledger import HELD_RUN, records, written

DIES_ONCE = str(Path(__file__).parents[1] / "helpers" / "dies_once.py")
NUM_BUCKETS = 3
# 37 windows of unlike lengths, 19 batches, of two domains; all figures and files that there are.
KEYS = {
    "protocol": {"_component_": "ppl_eval.protocols.rolling", "max_seq_len": 64},
    "max_windows": 37,
    "batch_size": 2,
    "per_window": True,
    "per_document": True,
    "per_token": True,
    "position_buckets": NUM_BUCKETS,
    "aggregation": {"precision": "float32"},
}
SIZE = record_dtype(NUM_BUCKETS).itemsize


def everything(folder):
    """All that a run says, apart from who scored what, and how fast."""
    result = result_of(folder)
    resumed = result["plan"].pop("resumed_batches")
    for name in ("timing", "parallel", "run", "notes"):
        del result[name]
    tables = {path.name: pq.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))}
    return (json.dumps(result), tables), resumed


@pytest.fixture(scope="module")
def killed(tiny, tmp_path_factory):
    """Two ranks, killed together after three batches each; and the result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("killed")
    rows = [{"text": line, "domain": name} for name in ("a", "b") for line in TEXT.splitlines()[:60]]
    text = folder / "text.jsonl"
    text.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dataset = {"_component_": "ppl_eval.data.text_files", "paths": [str(text)], "domain_column": "domain"}
    config = write_config(folder / "config.yaml", tiny.folder, text, **KEYS, dataset=dataset)
    os.environ["PPL_EVAL_HOME"] = str(folder / "home")
    alone = many(1, [["--config", str(config), f"output_dir={folder / 'alone'}"]], folder)
    assert alone.code == 0, alone.output
    held = start_held(config, folder, 2)
    for rank in held:
        rank.kill()
    yield folder, config
    del os.environ["PPL_EVAL_HOME"]


def start_held(config, folder, num_processes, *overrides):
    """Ranks that stand still after three batches each."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "HOLD_AFTER": "3",
        "HELD": str(folder / "held"),
        "GO": str(folder / "go"),
    }
    held = [
        Script(
            [HELD_RUN, "--config", str(config), *overrides],
            {**env, **rank_variables(rank, num_processes)},
            folder / "held.txt",
        )
        for rank in range(num_processes)
    ]
    wait_for([folder / f"held.{rank}" for rank in range(num_processes)], held)
    held[0].store = store  # Ranks live no longer than it.
    return held


def ledger_of(out):
    (folder,) = (out / "ledger").iterdir()
    return folder


def change(path, edit):
    content = bytearray(path.read_bytes())
    path.write_bytes(edit(content))


def torn(out):
    """Half of a record at the end, as a write that power cut short."""
    change(ledger_of(out) / "rank-0.bin", lambda content: content[: -SIZE // 2])
    change(ledger_of(out) / "tokens-0.bin", lambda content: content[:-1000])


def unsynced(out):
    """Zeroes where the last batch was, and some beyond, as file systems leave."""
    change(ledger_of(out) / "rank-1.bin", lambda content: content[: -2 * SIZE] + bytes(2 * SIZE + 100))


def without_tokens(out):
    """A record of a token that the disk did not get, though it got the window's."""
    change(ledger_of(out) / "tokens-0.bin", lambda content: content[:-32])


def changed_tokens(out):
    """A token's NLL that the disk changed, in a file of the right length."""
    change(
        ledger_of(out) / "tokens-0.bin",
        lambda content: content[:18] + bytes([content[18] ^ 64]) + content[19:],
    )


def whole(_):
    pass


@pytest.fixture
def copies(killed, tmp_path):
    folder, config = killed

    def copy(name, edit=whole):
        out = tmp_path / name
        shutil.copytree(folder / "out", out)
        edit(out)
        return ["--config", str(config), f"output_dir={out}", "resume=require"]

    return copy


FSDP = ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=1"]


@pytest.mark.parametrize(
    ("num_processes", "cases"),
    [
        (
            1,
            {
                "whole": (whole, [], 6),
                "torn": (torn, [], 5),
                "unsynced": (unsynced, [], 5),
                "tokens": (without_tokens, [], 5),
                "changed_tokens": (changed_tokens, [], 5),
            },
        ),
        (2, {"same": (whole, [], 6), "fsdp": (torn, FSDP, 5)}),
        (3, {"reversed": (unsynced, ["reversed"], 5)}),
        pytest.param(
            4,
            {"hsdp": (whole, ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=2"], 6)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: f"{value}_ranks" if isinstance(value, int) else "",
)
def test_a_run_goes_on_to_the_same_bits(killed, copies, tmp_path, num_processes, cases):
    expected, _ = everything(killed[0] / "alone")
    argvs = []
    for name, (edit, overrides, _) in cases.items():
        first = overrides[:1] if overrides == ["reversed"] else []
        argvs.append([*first, *copies(name, edit), *(overrides if not first else [])])
    finished = many(num_processes, argvs, tmp_path, {"OMP_NUM_THREADS": "1"})
    assert finished.code == 0, finished.output
    for name, (_, _, num_done) in cases.items():
        found, resumed = everything(tmp_path / name)
        assert resumed == num_done, name
        assert found == expected, name
        assert not (tmp_path / name / "ledger").exists()


def test_hosts_without_a_shared_folder_bring_their_parts(killed, copies, tmp_path):
    expected, _ = everything(killed[0] / "alone")
    envs = []
    for rank in range(2):
        argv = copies(f"host{rank}")
        folder = ledger_of(tmp_path / f"host{rank}")
        (folder / f"rank-{1 - rank}.bin").unlink()
        envs.append({"OUT": str(tmp_path / f"host{rank}"), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"})
    argv[2] = "output_dir=${oc.env:OUT}"
    finished = ranks([["-m", "distributed_ppl_eval", *argv]] * 2, tmp_path, envs)
    assert finished.code == 0, finished.output
    assert everything(tmp_path / "host0") == (expected, 6)
    assert not (tmp_path / "host1" / "ledger").exists()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_torchrun_restarts_a_run_whose_rank_was_killed(killed, tmp_path, seed):
    """`--max-restarts 1`: one rank is killed at a seeded moment, and done windows are not scored again."""
    folder, config = killed
    expected, _ = everything(folder / "alone")
    dice = random.Random(seed)
    num_ranks, after = dice.choice([2, 3]), dice.randrange(1, 6)
    dies = {
        "KILL_RANK": str(dice.randrange(num_ranks)),
        "KILL_AFTER": str(after),
        "KILLED": str(tmp_path / "k"),
    }
    launch = [TORCHRUN, "--standalone", "--nproc_per_node", str(num_ranks), "--max-restarts", "1", DIES_ONCE]
    finished = run(*launch, "--config", str(config), f"output_dir={tmp_path / 'out'}", env=dies)
    assert finished.code == 0, finished.output
    assert (tmp_path / "k").exists()
    found, resumed = everything(tmp_path / "out")
    assert found == expected
    assert resumed >= after
    assert f"resumed: {resumed} of 19 batches" in finished.output


@pytest.mark.slow
def test_a_killed_launcher_leaves_what_was_scored(killed, tmp_path):
    """kill -9 of torchrun: the ranks notice, end, and the next run goes on."""
    folder, config = killed
    argv = ["--config", str(config), f"output_dir={tmp_path / 'out'}"]
    env = {**os.environ, "HOLD_AFTER": "4", "HELD": str(tmp_path / "held"), "GO": str(tmp_path / "go")}
    launcher = subprocess.Popen([TORCHRUN, "--standalone", "--nproc_per_node", "2", HELD_RUN, *argv], env=env)
    wait_for([tmp_path / "held.0", tmp_path / "held.1"], [])
    launcher.kill()
    launcher.wait()
    # They hold the lock until they are gone.
    FileLock(tmp_path / "out" / ".lock").acquire(timeout=60).lock.release()
    finished = many(2, [[*argv, "resume=require"]], tmp_path)
    assert finished.code == 0, finished.output
    assert everything(tmp_path / "out") == (everything(folder / "alone")[0], 8)


def test_never_starts_over_and_keeps_the_records(killed, copies, tmp_path):
    expected, _ = everything(killed[0] / "alone")
    argv = [*copies("again")[:-1], "resume=never"]
    key = ledger_of(tmp_path / "again").name
    finished = many(1, [argv], tmp_path)
    assert finished.code == 0, finished.output
    assert everything(tmp_path / "again") == (expected, 0)
    (kept,) = (tmp_path / "again" / "previous" / key).iterdir()
    assert len(read_ledger(kept, record_dtype(NUM_BUCKETS))) == 12


def test_another_evaluation_is_refused_before_it_scores(copies, tmp_path):
    argv = [*copies("other")[:-1], "protocol.max_seq_len=32"]
    key = ledger_of(tmp_path / "other").name
    finished = ranks([["-m", "distributed_ppl_eval", *argv]], tmp_path)
    assert finished.code == 2, finished.output
    assert f"its key is {key}, this run's is " in finished.output
    assert "protocol.max_seq_len: 32 here, 64 there" in finished.output
    assert len(read_ledger(ledger_of(tmp_path / "other"), record_dtype(NUM_BUCKETS))) == 12


def test_require_needs_something(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    argv = ["-m", "distributed_ppl_eval", "--config", str(config), "resume=require"]
    finished = ranks([argv], tmp_path)
    assert finished.code == 2, finished.output
    assert "nothing to go on from" in finished.output
    assert not (tmp_path / "out" / "ledger").exists()


FACTS = {"dtype": "bf16", "data": {"sha256": "x"}}


def test_check_names_what_differs(tmp_path):
    other = ledger.open_ledger(tmp_path, {**FACTS, "dtype": "fp32"}, 0)
    assert resume.check(tmp_path, FACTS, "auto") is None, "nothing was scored there"
    other.append(records(0))
    other.close()
    with pytest.raises(ValueError, match=r"dtype: bf16 here, fp32 there\nGo on"):
        resume.check(tmp_path, FACTS, "auto")
    assert other.folder.name in resume.check(tmp_path, FACTS, "never")
    assert resume.check(tmp_path, FACTS, "auto") is None


def test_work_is_on_the_disk_after_ten_seconds(tmp_path, monkeypatch):
    """Synchronised before ten seconds of work are not, and the next batch may take as long as the last."""
    now, synced = [0.0], []
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ledger.os, "fdatasync", lambda _: synced.append(now[0]))
    book = written(tmp_path, 0)
    for number, at in enumerate([1, 2, 6, 7, 8, 9.5, 10, 11, 31, 32]):
        now[0] = at
        book.append(records(number))
    assert synced == [6, 31]
    book.close()
    assert synced == [6, 31, 32]
