"""How a process ends: its exit code, its last line, and the file through which torchrun learns the cause."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128  # Plus the number of the signal that ended the run.

# torchrun gives every process a file of its own, and takes the cause of a failure from it.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Stop(Exception):
    """Ends this process without another word: the reason was already printed, here or by another rank."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Failure:
    """Why a run ends.

    Attributes:
        message: for the person.
        code: exit code of every process.
    """

    message: str
    code: int = EXIT_FAILED


def print_error(message: str) -> None:
    """Print the line that names the cause."""
    sys.stdout.flush()
    print(f"\nerror: {message}", file=sys.stderr, flush=True)


_listeners: list[Callable[[Failure], None]] = []


def tell_of_failures(listener: Callable[[Failure], None]) -> Callable[[], None]:
    """Call a function with why this process fails, before it ends; it must be quick.

    Returns:
        A function that ends this.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def record_cause(failure: Failure) -> None:
    """Leave the cause to torchrun, which shows it at the end of its output, and to whoever wants to know."""
    for listener in _listeners:
        listener(failure)
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    text = f"error: {failure.message}"
    # The form that torch.distributed.elastic reads and, of the first failure, hands on to its own caller.
    details = {"py_callstack": text, "timestamp": str(int(time.time())), "exit_code": failure.code}
    try:
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    except OSError as error:
        print(f"the cause cannot be written for torchrun: {error}", file=sys.stderr)


def read_cause(path: Path) -> Failure | None:
    """Read what ``record_cause`` wrote; None if it is missing or another program's."""
    try:
        message = json.loads(path.read_text())["message"]
        text, code = message["message"], message["extraInfo"]["exit_code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Failure(text.removeprefix("error: "), code)
