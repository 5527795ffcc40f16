"""A connection to a rendezvous store, in bounded time."""

import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

# Beyond its own timeout: the client of the store waits without limit for a server that accepts and is silent.
_GRACE_SECONDS = 5.0
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)


def open_store(address: str, port: int, *, is_master: bool, timeout: timedelta) -> dist.TCPStore:
    """Keep a store, or connect to one; whoever is not there yet is waited for.

    Args:
        address: of the host that keeps it.
        port: there.
        is_master: whether this process keeps it.
        timeout: of this connection, and of later waits.

    Raises:
        ValueError: names host and port, and says what to do.
    """
    opened: list[dist.TCPStore] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            # Not waiting for other processes here: `agree` does, and can say who is missing.
            opened.append(dist.TCPStore(address, port, None, is_master, timeout, wait_for_workers=False))
        except (ValueError, RuntimeError) as error:
            errors.append(error)

    # The call handles no signal and knows no limit; a thread that hangs in it ends with the process.
    attempt = threading.Thread(target=connect, name="store-connect", daemon=True)
    attempt.start()
    attempt.join(timeout.total_seconds() + _GRACE_SECONDS)
    if opened:
        return opened[0]
    endpoint = f"{address}:{port}"
    if not errors:
        raise ValueError(
            f"{endpoint} accepts connections and does not answer: another program holds the port, or the host"
            " is frozen. Choose a port that is free there"
        )
    (error,) = errors
    text = str(error).splitlines()[0]
    if is_master:
        raise ValueError(
            f"the store cannot be kept at {endpoint}: {text}. Choose a port that is free on this host"
        ) from error
    raise ValueError(
        f"{endpoint} cannot be reached: {text}. See that the host is up, that its firewall lets this one in,"
        " and that the process that keeps the store was started"
    ) from error


def check_endpoint(address: str, port: int, timeout: timedelta) -> None:
    """See that a rendezvous endpoint can be used, before a launcher waits for it far longer.

    A refused connection is right: nobody may have started yet. A host that does not answer is tried again.

    Raises:
        ValueError: names host and port, and says what to do.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    for wait in (*_RETRY_SECONDS, *[_RETRY_SECONDS[-1]] * 1000):
        left = max(1.0, deadline - time.monotonic())
        try:
            with socket.create_connection((address, port), left):
                break
        except ConnectionRefusedError:
            return
        except OSError as error:
            if time.monotonic() + wait > deadline:
                raise ValueError(
                    f"the rendezvous endpoint {address}:{port} cannot be reached: {error}. See that the"
                    " name is right, that the host is up, and that its firewall lets this one in"
                ) from error
            if wait == _RETRY_SECONDS[0]:
                print(f"{address}:{port} cannot be reached yet ({error}); trying again", flush=True)
            time.sleep(wait)
    open_store(address, port, is_master=False, timeout=min(timeout, timedelta(seconds=10)))
