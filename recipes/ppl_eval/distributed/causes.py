"""What an exception means for the person: the message and the exit code."""

import signal

import torch
import torch.distributed as dist

from ppl_eval.config import activity
from ppl_eval.distributed.outcome import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_SIGNAL, Failure

# Words of what gloo and nccl raise when a connection breaks: on ranks that did nothing wrong, too.
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")
# The last is oneDNN's, which has room for the code of a kernel to ask for and gives no reason.
_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a primitive",
)


class NoContact(ValueError):
    """Ranks could not exchange a first message: their network, or a rank that is gone."""


class OutOfMemory(MemoryError):
    """Memory ran out, and the message says what would fit."""


def is_connection(error: BaseException) -> bool:
    """Return whether an error may only follow from the end of another process."""
    if isinstance(error, dist.DistError | NoContact):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)


def is_for_person(error: BaseException) -> bool:
    """Return whether the message says it all, so that a traceback would only bury it."""
    return isinstance(error, ValueError | OSError | KeyboardInterrupt) or is_out_of_memory(error)


def explain(error: BaseException, where: str) -> Failure:
    """Return the message and exit code for an exception.

    Args:
        error: what was raised; its notes say what was being done (``add_note``).
        where: this process, for messages.
    """
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", EXIT_SIGNAL + signal.SIGINT)
    if isinstance(error, OutOfMemory):
        text = f"{where} is out of memory in {activity.now.describe()}{notes}: {error}"
        return Failure(text, EXIT_FAILED)
    if is_out_of_memory(error):
        return Failure(
            f"{where} is out of memory in {activity.now.describe()}{notes}: {first_line(error)}. Less is"
            " needed with a smaller batch_size, protocol.max_seq_len or max_logits_mib; with the model"
            " divided over processes (data_parallel_shard_dim=-1); with fewer processes on this host; or with"
            " a quantizer",
            EXIT_FAILED,
        )
    if isinstance(error, OSError):
        return Failure(f"{error} ({where}, {activity.now.describe()}{notes})", EXIT_BAD_INPUT)
    if isinstance(error, ValueError):
        return Failure((str(error) or type(error).__name__) + notes, exit_code_of(error))
    return Failure(f"{where}, {activity.now.describe()}{notes}: {type(error).__name__}: {error}", EXIT_FAILED)


def exit_code_of(error: ValueError | OSError) -> int:
    """Return the exit code for an error that is for the person; it may have one of its own."""
    return getattr(error, "exit_code", EXIT_BAD_INPUT)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: libraries append traces of their own."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory could not be had, of the host or of a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS)
