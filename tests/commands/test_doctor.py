"""`ppl-eval doctor`: what it says of a healthy machine, and of faults made on purpose."""

import copy
import json
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.processes import run_ranks
from ppl_eval.commands import cli, doctor, doctor_diff, doctor_network, nccl_log
from ppl_eval.commands.doctor import Finding


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = 0
    try:
        cli.main(["doctor", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_this_machine_can_run_the_recipe(capsys):
    code, output = called(capsys, "env", "--json")
    found = {finding["what"]: finding for finding in json.loads(output)}
    assert code == 0, [finding for finding in found.values() if finding["remedy"]]
    assert found["torchtune"]["found"] == "0.6.1"
    assert found["torch"]["needed"]


def test_a_package_that_is_missing_or_of_another_release_is_named(monkeypatch):
    needed = ["numpy>=99", "no-such-package>=1", "gguf>=0.1; extra == 'demo'"]
    monkeypatch.setattr(doctor, "requires", lambda _: needed)
    found = {finding.what: finding for finding in doctor._packages()}
    assert found["numpy"].remedy == "pip install 'numpy>=99'"
    assert found["no-such-package"].found == "absent"
    assert found["no-such-package"].remedy == "pip install 'no-such-package>=1'"
    assert "gguf" not in found


def test_kernels_that_depend_on_threads_are_named(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    (found,) = (finding for finding in doctor.environment() if finding.what == "MKL_CBWR")
    assert "AUTO,STRICT" in found.remedy


def test_only_differences_between_ranks_are_shown():
    same = {"python": "3.11", "memory free now": "1 GiB"}
    other = {"python": "3.12", "memory free now": "2 GiB", "cuda:0": "H100"}
    found = doctor.differences({"rank 0": same, "rank 1": same, "rank 2": other})
    assert [(finding.what, finding.found) for finding in found] == [
        ("python", "3.11 on rank 0, rank 1; 3.12 on rank 2"),
        ("cuda:0", "absent on rank 0, rank 1; H100 on rank 2"),
    ]
    assert doctor.differences({"rank 0": same, "rank 1": dict(same)}) == []


def test_names_and_ports_from_here(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = doctor_network.reach(["127.0.0.1"], port)
    assert found[1].found.startswith("answers after")
    assert doctor_network.reach(["127.0.0.1"], port)[1].found.startswith("reachable, nothing listens")
    code, output = called(capsys, "network", "--nodes", "no-such-host.invalid", "--json")
    assert code == 1
    assert json.loads(output)[0]["remedy"].startswith("mend DNS")


@run_ranks(2)
def test_latency_and_bandwidth_between_ranks(world_size):
    import torch
    import torch.distributed as dist

    from ppl_eval.distributed.agreement import Node

    class Met:
        rank, world_size, nodes = dist.get_rank(), 2, (Node("0", "here", [0, 1]),)

    device = torch.device("cpu")
    found = {finding.what for finding in doctor_network.network(Met, device)}
    assert "rank 0 (here) to rank 1 (here)" in found
    names = [finding.what for finding in doctor_network.bench(Met, device, 1 << 15)]
    assert "all_reduce, 32 KiB" in names
    assert "the vector of a run" in names


@pytest.mark.parametrize("size", ["", "12X", "0M", "M"])
def test_a_size_that_is_none_is_refused(capsys, size):
    code, output = called(capsys, "bench", "--size", size)
    assert code == 2
    assert "--size is" in output


NCCL_LOG = """
node-a:11:11 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node-a:11:30 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 busId 1000 - Init START
node-b:22:31 [1] NCCL INFO comm 0x66 rank 1 nranks 2 cudaDev 1 busId 2000 - Init START
node-a:11:30 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node-a:11:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0
node-a:11:30 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC
node-b:22:31 [1] NCCL WARN NET/Socket : peer closed the connection
node-a:11:30 [0] NCCL WARN socketProgress: Connection closed by remote peer
something else
"""


def test_an_nccl_log_says_interface_transport_and_who_failed_first(tmp_path):
    path = tmp_path / "log"
    path.write_text(NCCL_LOG)
    found = nccl_log.read_log(path)
    assert Finding("ranks seen", "", "2") in found
    assert any(finding.found == "node-a: eth0:10.0.0.1<0>" for finding in found)
    slow = next(finding for finding in found if finding.found.startswith("NET/Socket"))
    assert "NCCL_IB_DISABLE" in slow.remedy
    (first,) = (finding for finding in found if finding.what == "first warning")
    assert first.found == "rank 1 on node-b (device 1): NET/Socket : peer closed the connection"
    path.write_text("nothing of the kind\n")
    with pytest.raises(ValueError, match="NCCL_DEBUG=INFO"):
        nccl_log.read_log(path)


def result(**changes) -> dict:
    base = {
        "perplexity": 2.0,
        "ce_loss": 0.69,
        "nll_sum_hex": "0x1p+3",
        "num_tokens": 10,
        "num_windows": 2,
        "plan": {"max_windows": None, "whole": True, "batch_size": 4},
        "coverage": {"sha256": "a"},
        "dataset": {"fingerprint": {"text_sha256": "a"}},
        "protocol": {"name": "disjoint", "bos": "tokenizer", "max_seq_len": 4},
        "model": {"checkpoint": {"w": 1}, "component": "m", "arguments": {}},
        "quantizer": None,
        "dtype": "bf16",
        "versions": {"torch": "2.13.0", "cpu": "AVX512"},
    }
    made = copy.deepcopy(base)
    for name, value in changes.items():
        first, _, rest = name.partition("__")
        if rest:
            made[first][rest] = value
        else:
            made[first] = value
    return made


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"plan__max_windows": 3}, "plan: plan.max_windows"),
        ({"dataset__fingerprint": {"text_sha256": "b"}}, "tokens: dataset.fingerprint.text_sha256"),
        ({"protocol__bos": "never"}, "BOS: protocol.bos"),
        ({"protocol__max_seq_len": 8}, "protocol: protocol.max_seq_len"),
        ({"model__checkpoint": {"w": 2}}, "checkpoint: model.checkpoint.w"),
        ({"dtype": "fp32"}, "dtype: dtype"),
        ({"versions__cpu": "AVX2"}, "kernels: versions.cpu"),
        ({"plan__batch_size": 1}, "batches: plan.batch_size"),
        ({"versions__torch": "2.14.0"}, "versions: versions.torch"),
    ],
)
def test_each_cause_is_found_and_named_once(change, cause):
    found = [finding for finding in doctor_diff.explain(result(), result(**change)) if finding.remedy]
    assert [finding.what for finding in found] == [cause]


def test_the_windows_that_differ_most(tmp_path):
    for name, nll in (("a", [1.0, 2.0, 3.0]), ("b", [1.0, 2.5, 2.9])):
        (tmp_path / name).mkdir()
        columns = {"document": [0, 0, 1], "start": [0, 3, 0], "score_start": [1, 4, 1], "stop": [4, 7, 4]}
        columns |= {"num_tokens": [3, 3, 3], "nll_sum": nll}
        pq.write_table(pa.table(columns), tmp_path / name / "windows.parquet")
    found = doctor_diff.windows_that_differ(tmp_path / "a", tmp_path / "b")
    assert [finding.what for finding in found[1:]] == [
        "document 0, tokens 4 to 7 (seen from 3)",
        "document 1, tokens 1 to 4 (seen from 0)",
    ]
    assert found[1].found == "+0.500000 nats"
    assert "per_window=true" in doctor_diff.windows_that_differ(tmp_path / "a", Path(os.devnull))[0].found
