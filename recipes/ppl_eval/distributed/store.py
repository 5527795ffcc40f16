"""A connection to a rendezvous store, in bounded time."""

import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from ppl_eval.config.retries import retry

# Beyond its own timeout: the client of the store waits without limit for a server that accepts and is silent.
_GRACE_SECONDS = 5.0
# Processes that are started together come together, more or less.
_QUIET_SECONDS = 10.0


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
    endpoint, patience = f"{address}:{port}", timeout.total_seconds()
    attempt.join(min(_QUIET_SECONDS, patience))
    if attempt.is_alive() and patience > _QUIET_SECONDS:
        # torch's client tries again by itself, and says nothing.
        print(f"{endpoint} cannot be reached yet; trying for {patience:g} s", flush=True)
        attempt.join(patience - _QUIET_SECONDS)
    attempt.join(_GRACE_SECONDS)
    if opened:
        return opened[0]
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
    patience = timeout.total_seconds()
    try:
        retry(
            lambda: socket.create_connection((address, port), max(1.0, patience)).close(),
            f"{address}:{port} cannot be reached yet",
            patience_seconds=patience,
            is_transient=lambda error: not isinstance(error, ConnectionRefusedError),
        )
    except ConnectionRefusedError:
        return
    except OSError as error:
        raise ValueError(
            f"the rendezvous endpoint {address}:{port} cannot be reached: {error}. See that the"
            " name is right, that the host is up, and that its firewall lets this one in"
        ) from error
    open_store(address, port, is_master=False, timeout=min(timeout, timedelta(seconds=10)))
