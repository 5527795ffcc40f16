"""A run inside somebody else's program: it uses the process group that is there, and its errors are raised.

Nothing watches and nothing is ended: the process is not ours. A rank that fails says so in the store, and the
others raise when they come to the next step on which ranks agree.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ppl_eval.distributed.causes import explain
from ppl_eval.distributed.outcome import EXIT_FAILED, EXIT_SIGNAL, Failure, Stop
from ppl_eval.distributed.process import Process

# Nobody restarts it.
_START = "embedded"


class EvaluationError(Exception):
    """An evaluation failed, on this rank or another; the message names rank, phase and window."""


class InputError(EvaluationError, ValueError):
    """What was asked for cannot be evaluated: a config, a file or a setting has to be mended."""


def join(timeout_seconds: float) -> Process:
    """Return this process as a part of the process group that its program has formed; without one, alone.

    Raises:
        ValueError: if a launcher started several processes, and they have formed no group.
    """
    host, timeout = socket.gethostname(), timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise ValueError(
                f"a launcher started {started} processes (WORLD_SIZE), but there is no process group; call"
                " torch.distributed.init_process_group() before evaluate()"
            )
        return Process(0, 1, 0, host, host, dist.HashStore(), timeout, _START, embedded=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A connection of its own: a wait would keep other threads of the program out of the store.
    shared = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    # Every evaluation has its own keys; ranks evaluate together, so they count alike.
    number = shared.add(f"ppl_eval/evaluations/{rank}", 1)
    store = dist.PrefixStore(f"ppl_eval/embedded/{number}", shared)
    process = Process(rank, world_size, 0, host, host, store, timeout, _START, embedded=True)
    local_rank, node = _place(process)
    return Process(rank, world_size, local_rank, node, host, store, timeout, _START, embedded=True)


def _place(process: Process) -> tuple[int, str]:
    """Return the number of this process on its node, and the node's name."""
    env = os.environ
    if "LOCAL_RANK" in env and "GROUP_RANK" in env:
        return int(env["LOCAL_RANK"]), env["GROUP_RANK"]
    # Started without torchrun: processes of a host find out by its name.
    keys = [f"host/{rank}" for rank in range(process.world_size)]
    process.store.set(keys[process.rank], process.host)
    process.store.wait(keys, process.timeout)
    hosts = [process.store.get(key).decode() for key in keys]
    return hosts[: process.rank].count(process.host), process.host


@contextmanager
def raising(process: Process) -> Iterator[None]:
    """Turn a failure of any rank into one of the errors of this module, on all ranks.

    Raises:
        InputError: for what a person can mend.
        EvaluationError: for everything else.
    """
    try:
        yield
    except Stop as stop:
        failure = _first_failure(process) or Failure("another rank failed", stop.code)
        raise error_of(failure) from None
    except Exception as error:
        failure = explain(error, process.where)
        if process.world_size > 1 and process.where not in failure.message:
            failure = Failure(f"{process.where}: {failure.message}", failure.code)
        if not process.announce_failure(failure):
            failure = _first_failure(process) or failure
        raise error_of(failure) from error
    except BaseException:  # The person's own interruption stays what it is.
        process.announce_failure(Failure(f"{process.where} was interrupted", EXIT_FAILED))
        raise


def _first_failure(process: Process) -> Failure | None:
    announced = process.first_failure()
    return Failure(announced.message, announced.code) if announced else None


def error_of(failure: Failure) -> EvaluationError:
    """Return the error that stands for a failure."""
    # Between the two are bad input, and what has a code of its own (a baseline that is not comparable).
    kind = InputError if EXIT_FAILED < failure.code < EXIT_SIGNAL else EvaluationError
    return kind(failure.message)
