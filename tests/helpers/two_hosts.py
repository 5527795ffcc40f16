"""Two hosts on one machine: network namespaces with host names of their own, joined by a cable that can be
cut."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from helpers.processes import Script
from helpers.runs import TORCHRUN

NAMES = ("host-a", "host-b")

ENDPOINT = "10.93.7.1:29400"


def why_not() -> str | None:
    """The reason why this machine cannot play two hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "network namespaces need iproute2 and util-linux"
    probe = f"probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@dataclass
class TwoHosts:
    """Both hosts; host 0 keeps the rendezvous."""

    tag: str
    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    def namespace(self, host: int) -> str:
        return f"ppl{self.tag}-{host}"

    def interface(self, host: int) -> str:
        return f"v{self.tag}-{host}"

    def launch(
        self, nproc_per_node: tuple[int, int], *command: str, env: dict[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start torchrun with a command on each host."""
        commands = [(TORCHRUN, "--nproc_per_node", str(nproc), *command) for nproc in nproc_per_node]
        rendezvous = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": ENDPOINT}
        return self.start(commands, {**rendezvous, "PET_RDZV_ID": self.tag, **(env or {})})

    def start(self, commands: list[tuple[str, ...]], env: dict[str, str]) -> list[subprocess.Popen[str]]:
        """Start a command on each host; stdout and stderr come together."""
        self.agents = [self._process(host, command, env) for host, command in enumerate(commands)]
        return self.agents

    def _process(self, host: int, command: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[str]:
        enter = ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c"]
        here = {
            "GLOO_SOCKET_IFNAME": self.interface(host),
            # No name server knows these hosts, so they cannot see by themselves which of them is meant.
            "PET_RDZV_CONF": f"is_host={int(host == 0)}",
            "PET_LOCAL_ADDR": address(host),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [*enter, f'hostname {NAMES[host]}; exec "$@"', "sh", *command],
            env={**os.environ, **here, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.namespace(0), "link", "set", self.interface(0), "down")

    def pids(self, host: int) -> list[int]:
        """Every process of a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def finish(self, timeout: float) -> list[str]:
        """Wait for both agents; what each host printed."""
        give_up = time.monotonic() + timeout
        late = []
        for host, agent in enumerate(self.agents):
            try:
                agent.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(f"{NAMES[host]} still had processes {self.pids(host)}")
        for host in range(2 if late else 0):
            self.kill(host)
        outputs = [agent.communicate()[0] for agent in self.agents]
        assert not late, "\n".join([*late, *outputs])
        return outputs

    def kill(self, host: int) -> None:
        """End everything on a host at once, as a power cut does."""
        for pid in self.pids(host):
            os.kill(pid, signal.SIGKILL)


def address(host: int) -> str:
    """Address of a host on the cable."""
    return f"10.93.7.{host + 1}"


def wait_for(
    files: list[Path], agents: Sequence["subprocess.Popen[str] | Script"], timeout: float = 240
) -> None:
    """Wait until all files are there; an agent that ended before they are fails the test."""
    give_up = time.monotonic() + timeout
    while not all(file.exists() for file in files):
        for agent in agents:
            if agent.poll() is not None:
                raise AssertionError(agent.output() if isinstance(agent, Script) else agent.communicate()[0])
        assert time.monotonic() < give_up, f"{[str(file) for file in files]} did not come"
        time.sleep(0.05)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Build both hosts and the cable; whatever runs on them afterwards is killed."""
    hosts = TwoHosts(str(os.getpid()))
    try:
        for host in (0, 1):
            _ip("netns", "add", hosts.namespace(host))
        ends = [("name", hosts.interface(h), "netns", hosts.namespace(h)) for h in (0, 1)]
        _ip("link", "add", *ends[0][1:], "type", "veth", "peer", *ends[1])
        for host in (0, 1):
            inside = ("-n", hosts.namespace(host))
            _ip(*inside, "addr", "add", f"{address(host)}/24", "dev", hosts.interface(host))
            for link in ("lo", hosts.interface(host)):
                _ip(*inside, "link", "set", link, "up")
        yield hosts
    finally:
        for host in (0, 1):
            hosts.kill(host)
        for agent in hosts.agents:
            agent.kill()
            agent.wait()
        for host in (0, 1):
            subprocess.run(["ip", "netns", "del", hosts.namespace(host)], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
