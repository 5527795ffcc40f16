"""Start the recipe on one or more nodes, with the rendezvous that `tune run` needs and does not ask for.

`tune run --nnodes 2` without an endpoint makes each node wait, alone and for ever, for another one: it starts
a rendezvous of its own on each.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from ppl_eval.config.settings import read_settings
from ppl_eval.distributed.outcome import ERROR_FILE, EXIT_SIGNAL, Failure, print_error, read_cause
from ppl_eval.distributed.parent import end_with_parent

ENDPOINT = "PET_RDZV_ENDPOINT"
# With 1, every start of the ranks gets a store of its own, which rank 0 keeps. Else torchrun keeps one for
# all starts, and does not tell a node that joins later where it is (torch 2.13, `next_rendezvous`).
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_LOOPBACK = ("localhost", "127.", "[::1]", "::1")


class Launch(NamedTuple):
    """How to start the processes of a node.

    Attributes:
        command: the launcher's, with the recipe's arguments.
        environment: variables that it needs.
        timeout_seconds: the recipe's.
    """

    command: list[str]
    environment: dict[str, str]
    timeout_seconds: float


def prepare(
    nnodes: str,
    nproc_per_node: str,
    rdzv_endpoint: str | None,
    rdzv_id: str,
    recipe_arguments: Sequence[str],
    *,
    max_restarts: int = 0,
) -> Launch:
    """Return how to start this node's processes.

    Processes of one host find each other over loopback, where nobody else can reach them.

    Args:
        nnodes: nodes of the run, or MIN:MAX; the same command is started on each.
        nproc_per_node: processes on this node; a number, or a word that torchrun knows, such as ``gpu``.
        rdzv_endpoint: host:port of one of the nodes, which all can reach.
        rdzv_id: name of the run; runs that share an endpoint need different ones.
        recipe_arguments: ``--config NAME [key=value ...]``.
        max_restarts: how often ranks that failed are started again.

    Raises:
        ValueError: if the nodes could not find each other, or the config is wrong: before anyone waits.
    """
    settings = read_settings(recipe_arguments)
    # Of the working directory's modules none is to be taken for Python's, as `python -m` would.
    environment = {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "ppl_eval.commands.one_host"]
    fewest, most = _node_range(nnodes)
    if most > 1:
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
        command = [str(Path(sys.executable).with_name("tune")), "run", "--nnodes", nnodes]
        environment |= {"PET_RDZV_BACKEND": "c10d", ENDPOINT: rdzv_endpoint, "PET_RDZV_ID": rdzv_id}
        if fewest < most:
            environment[OWN_STORES] = "1"
    elif sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command += ["--nproc_per_node", nproc_per_node]
    if max_restarts:
        command += ["--max_restarts", str(max_restarts)]
    command += ["distributed_ppl_eval", *recipe_arguments]
    return Launch(command, environment, settings.timeout_seconds)


def _node_range(nnodes: str) -> tuple[int, int]:
    fewest, _, most = nnodes.partition(":")
    most = most or fewest
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most)):
        raise ValueError(
            f"--nnodes is {nnodes!r}; it must be a number of at least 1, or the fewest and the most: 1:2"
        )
    return int(fewest), int(most)


def start(launch: Launch) -> int:
    """Run the launcher, hand it the signals that come, and print the cause of a failure last.

    torchrun prints the cause above a page of its own words, and has one exit code for all of them.

    Returns:
        The exit code: the recipe's, or 128 and the signal's number.

    Raises:
        ValueError: if the rendezvous endpoint cannot be used.
    """
    if endpoint := launch.environment.get(ENDPOINT):
        # Torch, and seconds of imports, are for several nodes only.
        from ppl_eval.distributed.store import check_endpoint

        host, _, port = endpoint.rpartition(":")
        check_endpoint(host.strip("[]"), int(port), timedelta(seconds=launch.timeout_seconds))
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="ppl_eval_launch_") as folder:
        cause = Path(folder) / "cause.json"
        # A process group of its own: a terminal's signals come here alone, and are handed on once.
        child = subprocess.Popen(
            launch.command,
            env={**os.environ, **launch.environment, ERROR_FILE: str(cause)},
            process_group=0,
            preexec_fn=end_with_parent,
        )
        handed_on = _hand_on_signals(child)
        code = child.wait()
        failure = read_cause(cause)
    if code == 0:
        return 0
    if handed_on:
        failure = failure or Failure(
            f"stopped by {handed_on[0].name}; finished windows are recorded, the same command goes on from"
            " there",
            EXIT_SIGNAL + handed_on[0],
        )
    failure = failure or Failure(
        f"the launcher ended with exit code {code} before a process could say why; its messages are above"
    )
    print_error(failure.message)
    return failure.code


def _hand_on_signals(child: "subprocess.Popen[bytes]") -> list[signal.Signals]:
    handed_on: list[signal.Signals] = []

    def hand_on(number: int, _: object) -> None:
        handed_on.append(signal.Signals(number))
        with suppress(ProcessLookupError):
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    return handed_on
