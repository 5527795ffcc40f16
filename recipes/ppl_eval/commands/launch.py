"""Start the recipe on one or more nodes, with the rendezvous that `tune run` needs and does not ask for.

`tune run --nnodes 2` without an endpoint makes each node wait, alone and for ever, for another one: it starts
a rendezvous of its own on each.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ppl_eval.config.settings import read_settings

ENDPOINT = "PET_RDZV_ENDPOINT"
_LOOPBACK = ("localhost", "127.", "[::1]", "::1")


def prepare(
    nnodes: int, nproc_per_node: str, rdzv_endpoint: str | None, rdzv_id: str, recipe_arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts this node's processes, and the environment variables that it needs.

    Processes of one host find each other over loopback, where nobody else can reach them.

    Args:
        nnodes: nodes of the run; the same command is started on each.
        nproc_per_node: processes on this node; a number, or a word that torchrun knows, such as ``gpu``.
        rdzv_endpoint: host:port of one of the nodes, which all can reach.
        rdzv_id: name of the run; runs that share an endpoint need different ones.
        recipe_arguments: ``--config NAME [key=value ...]``.

    Raises:
        ValueError: if the nodes could not find each other, or the config is wrong: before anyone waits.
    """
    read_settings(recipe_arguments)
    # Of the working directory's modules none is to be taken for Python's, as `python -m` would.
    environment = {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "ppl_eval.commands.one_host"]
    if nnodes < 1:
        raise ValueError(f"--nnodes is {nnodes}; it must be at least 1")
    if nnodes > 1:
        if not rdzv_endpoint:
            raise ValueError(
                f"--nnodes {nnodes} needs --rdzv_endpoint HOST:PORT, the same on all nodes: one of them, by a"
                " name or address that the others can reach, and a port that is free there. Without it every"
                " node would wait for the others for ever"
            )
        host, colon, port = rdzv_endpoint.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ValueError(
                f"--rdzv_endpoint is {rdzv_endpoint!r}; it must be HOST:PORT, such as node0:29500"
            )
        if host.startswith(_LOOPBACK):
            raise ValueError(
                f"--rdzv_endpoint is {rdzv_endpoint!r}, which is every node's own name for itself; use one"
                " that the other nodes can reach"
            )
        command = [str(Path(sys.executable).with_name("tune")), "run", "--nnodes", str(nnodes)]
        environment |= {"PET_RDZV_BACKEND": "c10d", ENDPOINT: rdzv_endpoint, "PET_RDZV_ID": rdzv_id}
    elif sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command += ["--nproc_per_node", nproc_per_node]
    return [*command, "distributed_ppl_eval", *recipe_arguments], environment


def start(command: list[str], environment: dict[str, str]) -> None:
    """Become the command; does not return."""
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **environment})
