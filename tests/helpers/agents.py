"""torchrun's agents of several nodes on this machine: each node is a torchrun, they meet over loopback."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch.distributed as dist

from helpers.processes import free_port


@dataclass
class Agents:
    """Nodes of one run.

    Args:
        scratch: folder for what they print.
        endpoint: port of their rendezvous.
        env: variables of every node.
    """

    scratch: Path
    endpoint: int
    env: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, address: int = 1) -> int:
        """Start one more node.

        Args:
            command: torchrun, or a program that starts it, and its arguments.
            address: last byte of its loopback address, by which torchrun orders the nodes.

        Returns:
            Its number.
        """
        node = len(self.running)
        rendezvous = {
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{self.endpoint}",
            "PET_RDZV_ID": "t",
            "PET_LOCAL_ADDR": f"127.0.0.{address}",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.scratch / f"node-{node}.txt", "wb") as output:
            self.running.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **rendezvous, **self.env},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return node

    def kill(self, node: int) -> None:
        """End a node at once, with all its ranks."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.running[node].pid)
            first.suspend()  # It would start ranks again that end before it.
            for process in [*first.children(recursive=True), first]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.running[node].wait()

    def wait(self, nodes: Sequence[int], timeout: float) -> list[int]:
        """Return the exit codes of nodes that end by themselves."""
        return [self.running[node].wait(timeout) for node in nodes]

    def output(self) -> str:
        """Return what all nodes printed so far."""
        return "\n".join((self.scratch / f"node-{n}.txt").read_text() for n in range(len(self.running)))


@contextmanager
def agents(scratch: Path, env: dict[str, str], *, endpoint_stays: bool = False) -> Iterator[Agents]:
    """Yield nodes to start; what still runs at the end is killed.

    Args:
        scratch: a folder to write to.
        env: variables of every node.
        endpoint_stays: whether this process keeps the rendezvous, so that it outlives every node; else the
            first node that starts does.
    """
    store = None
    if endpoint_stays:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {**env, "PET_RDZV_CONF": f"is_host=0,{env.get('PET_RDZV_CONF', '')}".rstrip(",")}
    nodes = Agents(scratch, store.port if store else free_port(), env)
    try:
        yield nodes
    finally:
        for node in range(len(nodes.running)):
            nodes.kill(node)
