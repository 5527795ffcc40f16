"""Run an ordinary function on N real processes that form a gloo group, and get what each of them returned."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Processes are forked from a server that has the slow imports behind it and has started no thread.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torchtune.modules",
        "torchtune.training",
    ]
)
TIMEOUT = timedelta(seconds=120)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` on every rank of a new gloo group.

    Args:
        function: a function of a module's top level.
        world_size: processes.
        args: further arguments; picklable.

    Returns:
        What each rank returned, by rank.

    Raises:
        AssertionError: with the traceback of the first rank that failed; the others are stopped.
    """
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        for rank in range(world_size):
            receiver, sender = _FORK_SERVER.Pipe(duplex=False)
            process = _FORK_SERVER.Process(
                target=_entry,
                args=(sender, function, rank, world_size, str(Path(folder) / "rendezvous"), args),
                daemon=True,
            )
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
                for pipe in ready:
                    results[pipes[pipe]] = _receive(pipe, pipes[pipe])
        finally:
            for process in processes:
                # A rank that returned ends by itself; one whose peers failed would wait for them.
                process.join(timeout=10 if len(results) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [results[rank] for rank in range(world_size)]


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        returned, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    assert returned, f"rank {rank} failed:\n{value}"
    return value


def _entry(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        value = function(rank, world_size, *args)
        dist.barrier()
        dist.destroy_process_group()
        # Plain pickle: a connection's own would hand tensors over in memory that ends with this process.
        sender.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # Without this the group's destructor would wait for peers that wait for this rank.
        sender.close()
        os._exit(1)
