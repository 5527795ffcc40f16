"""Failing together: a failure of one rank ends all of them within seconds, and its cause is printed once."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ppl_eval.world import ABORT, EXIT_BAD_INPUT, EXIT_FAILED, POLL, Stop, World

_GRACE_SECONDS = 5.0


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """While inside, a failure of any rank ends all of them within seconds, and its cause is printed once.

    Raises:
        Stop: in the place of a ValueError or OSError, which is printed as it was written for the person, and
            of errors that only follow from another rank's. Any other exception passes through, for its
            traceback.
    """
    with _watch_for_abort(world):
        try:
            yield
        except Stop:
            raise
        except BaseException as error:
            first = world.announce_failure(f"{type(error).__name__}: {error}")
            for_person = isinstance(error, ValueError | OSError | KeyboardInterrupt)
            if first and for_person:
                print(f"\nerror: {str(error) or 'interrupted'}", file=sys.stderr, flush=True)
            if for_person or not first:
                raise Stop(EXIT_BAD_INPUT if first else EXIT_FAILED) from error
            raise


@contextmanager
def _watch_for_abort(world: World) -> Iterator[None]:
    # The launcher ends the ranks of one node together, but not those of others, which would wait in a
    # collective until it times out.
    if world.world_size == 1:
        yield
        return
    done = threading.Event()
    store = world.store.clone()  # type: ignore[attr-defined]

    def watch() -> None:
        while not done.wait(POLL.total_seconds()):
            try:
                if not store.check([ABORT]):
                    continue
                reason = json.loads(store.get(ABORT))
            except (dist.DistError, RuntimeError) as error:
                reason = {"host": None, "where": "the rendezvous store", "message": str(error)}
            if done.is_set() or reason["where"] == world.where:
                return
            if reason["host"] != world.host and world.local_rank == 0:
                print(
                    f"{world.where} stops: {reason['where']} failed: {reason['message']}",
                    file=sys.stderr,
                    flush=True,
                )
            # The launcher of this node should find the rank that failed before those that only follow.
            if reason["host"] == world.host and done.wait(_GRACE_SECONDS):
                return
            # A collective or a kernel cannot be interrupted in any other way.
            os._exit(EXIT_FAILED)

    thread = threading.Thread(target=watch, name="abort-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
