"""Rendezvous stores that cannot be had: found in bounded time, with host, port and what to do."""

import re
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from helpers.runs import ranks
from helpers.tiny import write_config
from ppl_eval.distributed.store import check_endpoint, open_store

SECOND = timedelta(seconds=1)


@pytest.fixture
def silent_port():
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_silent_server_is_named(silent_port):
    told = f"127.0.0.1:{silent_port} accepts connections and does not answer"
    with pytest.raises(ValueError, match=told):
        open_store("127.0.0.1", silent_port, is_master=False, timeout=SECOND)
    with pytest.raises(ValueError, match=told):
        check_endpoint("127.0.0.1", silent_port, SECOND)


def test_a_port_that_is_taken_is_named(silent_port):
    with pytest.raises(ValueError, match=rf"cannot be kept at 127.0.0.1:{silent_port}: .*[Cc]hoose a port"):
        open_store("127.0.0.1", silent_port, is_master=True, timeout=SECOND)


def test_a_store_that_nobody_keeps_is_named():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be reached"):
            open_store("127.0.0.1", port, is_master=False, timeout=SECOND)
        # Before a launch this is as it should be.
        check_endpoint("127.0.0.1", port, SECOND)


def test_an_unknown_host_is_named(capsys):
    with pytest.raises(ValueError, match=r"endpoint no-such-host\.invalid:29500 cannot be reached"):
        check_endpoint("no-such-host.invalid", 29500, SECOND)
    assert "trying again" in capsys.readouterr().out


def test_a_store_that_comes_late_is_waited_for():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = []
    late = threading.Timer(1.0, lambda: kept.append(dist.TCPStore("127.0.0.1", port, None, True)))
    late.start()
    store = open_store("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    store.set("key", "value")
    late.join()
    assert kept[0].get("key") == b"value"


@pytest.mark.slow
def test_ranks_whose_port_is_taken_end_with_its_number(tiny, tmp_path, private_home, silent_port):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    job = ["-m", "distributed_ppl_eval", "--config", str(config), "timeout_seconds=3"]
    own_store = {"MASTER_PORT": str(silent_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    finished = ranks([job] * 2, tmp_path, [own_store] * 2, timeout=60)
    assert finished.codes == (1, 1)
    told = re.findall(r"^error: rank (\d) on \S+ has no rendezvous store .*", finished.output, re.MULTILINE)
    assert sorted(told) == ["0", "1"], finished.output
    assert finished.output.count(f"127.0.0.1:{silent_port}") >= 2
