"""Real processes that cost a fork instead of an interpreter and its imports.

``run_ranks`` makes an ordinary test run on every rank of a gloo group; ``Script`` stands in for
``subprocess.Popen`` of a Python script. Both are forked from one server a session, which has imported what is
slow.
"""

import functools
import inspect
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

# The server computes nothing: threads of OpenMP and gloo would not survive the fork.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torchtune.models",
        "torchtune.training",
        "transformers",
        "distributed_ppl_eval",
        "ppl_eval.data",
        "ppl_eval.results.result",
        "ppl_eval.run.calibration_text",
        "ppl_eval.scoring.load",
    ]
)
TIMEOUT = timedelta(seconds=120)


def run_ranks(*world_sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on every rank of a new gloo group of real processes, once for each world size.

    The test is an ordinary pytest function. Its fixtures are made in pytest's process and sent to the ranks,
    so they must be picklable; ``torch.distributed`` tells a rank which one it is. An exception on any rank
    fails the test with that rank's traceback.

    Args:
        world_sizes: numbers of processes; a test that has an argument ``world_size`` gets it.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        wants_size = "world_size" in signature.parameters

        @functools.wraps(test)
        def launch(*, world_size: int, **fixtures: Any) -> None:
            __tracebackhide__ = True
            on_ranks(launch, world_size, **fixtures, **({"world_size": world_size} if wants_size else {}))

        if not wants_size:
            size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            launch.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[*signature.parameters.values(), size]
            )
        return pytest.mark.parametrize("world_size", world_sizes, ids="{}_ranks".format)(launch)

    return decorate


def on_ranks(function: Callable[..., Any], world_size: int, /, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a function on every rank of a new gloo group.

    Args:
        function: a function of a module's top level.
        world_size: processes.
        args: arguments; picklable.
        kwargs: the same, by name.

    Returns:
        What each rank returned, by rank.

    Raises:
        AssertionError: with the traceback of the first rank that failed; the others are stopped.
    """
    __tracebackhide__ = True
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        pipes, processes = {}, []
        for rank in range(world_size):
            receiver, sender = _FORK_SERVER.Pipe(duplex=False)
            call = (sender, function, rank, world_size, rendezvous, args, kwargs)
            process = _FORK_SERVER.Process(target=_rank, args=call, daemon=True)
            process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        try:
            while len(results) < world_size:
                ready = wait(
                    [pipe for pipe, rank in pipes.items() if rank not in results],
                    timeout=TIMEOUT.total_seconds(),
                )
                silent = sorted(set(range(world_size)) - set(results))
                assert ready, f"ranks {silent} neither returned nor failed in {TIMEOUT}"
                failed = []
                for pipe in ready:
                    returned, results[pipes[pipe]] = _receive(pipe)
                    failed += [] if returned else [f"rank {pipes[pipe]} failed:\n{results[pipes[pipe]]}"]
                # Together: errors of its peers may be here as soon as the one that caused them.
                assert not failed, "\n".join(failed)
        finally:
            for process in processes:
                # A rank that returned ends by itself; one whose peers failed would wait for them.
                process.join(timeout=10 if len(results) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "it ended without a result"


def _rank(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(rank_variables(rank, world_size))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        value = inspect.unwrap(function)(*args, **kwargs)
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickle: a connection's own would hand tensors over in memory that ends with this process.
        sender.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # Without this the group's destructor would wait for peers that wait for this rank.
        sender.close()
        os._exit(1)


def free_port() -> int:
    """A port of loopback that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """The variables by which torchrun tells a process of one node its place."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", **sizes}


class Script:
    """A running Python script, as ``subprocess.Popen([sys.executable, *argv])`` would start it.

    What an interpreter does at its very end, ``atexit`` for one, it does not: tests of that need a real one.

    Args:
        argv: the script's path and arguments, or ``-m``, a module and arguments.
        env: variables over those of this process; OMP_NUM_THREADS is heeded.
        output: file to append stdout and stderr to; several processes may share one.
    """

    def __init__(self, argv: list[str], env: Mapping[str, str], output: Path) -> None:
        self._output = output
        self._process = _FORK_SERVER.Process(target=_script, args=(argv, {**os.environ, **env}, str(output)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the script runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit code once the script has ended.

        Raises:
            AssertionError: if that takes longer than ``timeout`` seconds; the script is killed.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        self.kill()
        assert code is not None, f"still running after {timeout} s:\n{self.output()}"
        return code

    def kill(self) -> None:
        """End the script at once, as ``kill -9`` does."""
        self._process.kill()
        self._process.join()

    def output(self) -> str:
        """Return what was printed so far, by all processes that share the file."""
        return self._output.read_text(encoding="utf-8") if self._output.exists() else ""


def _script(argv: list[str], env: dict[str, str], output: str) -> None:
    import torch

    os.environ.update(env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # torch read the variable when the server imported it.
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    module, sys.argv = (argv[1], argv[1:]) if argv[0] == "-m" else (None, argv)
    try:
        if module is None:
            runpy.run_path(argv[0], run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
