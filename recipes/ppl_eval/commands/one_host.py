"""torchrun for the processes of one host, on loopback only.

    python -m ppl_eval.commands.one_host --nproc_per_node 8 distributed_ppl_eval --config ...

torchrun's own rendezvous stores listen on every interface of the machine, have no password, and unpickle what
they are sent. No option binds them; a store over a socket that is bound already does not listen elsewhere.
"""

import os
import socket
import sys
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ppl_eval.distributed.outcome import ERROR_FILE, EXIT_FAILED, EXIT_SIGNAL, read_cause

BACKEND = "ppl_eval_loopback"
ADDRESS = "127.0.0.1"
_TIMEOUT_SECONDS = 600


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single node, with a store that only processes of this host can reach.

    Args:
        run_id: the launch's.
    """

    def __init__(self, run_id: str) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = listener.getsockname()[1]
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=run_id, timeout=_TIMEOUT_SECONDS)
        # The store closes the socket when it ends.
        self._store = TCPStore(
            ADDRESS, port, None, True, self.timeout, multi_tenant=True, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        """Return the name that ``--rdzv_backend`` has."""
        return BACKEND


def _create(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(parameters.run_id)


def main() -> None:
    """Run torchrun with this rendezvous, and without its tracebacks."""
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, _create)
    try:
        run.main([f"--rdzv_backend={BACKEND}", f"--local_addr={ADDRESS}", "-m", *sys.argv[1:]])
    except SignalException as stop:
        # Where torchrun was when the signal came says nothing about the run.
        sys.exit(EXIT_SIGNAL + stop.sigval)
    except ChildFailedError as error:
        # `ppl-eval launch` prints the cause that a rank recorded; of other ends torchrun knows most.
        if read_cause(Path(os.environ.get(ERROR_FILE, ""))) is None:
            print(error, file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
