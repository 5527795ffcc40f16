"""The name of one start of a run: processes that torchrun restarts have another than those before them.

torchrun restarts over the same store, and counts restarts by node: two nodes may have counted to different
numbers, and a node that left or joined counts for none. So rank 0 names every start anew, and gives the name
to whoever asks for it with a word that nobody used before: what stands in the store from an earlier start
answers no question of this one.
"""

import secrets
import threading
import time
from contextlib import suppress

import torch.distributed as dist

_NOBODY = "-"
_PAUSE_SECONDS = 0.1


def name_start(store: dist.Store, rank: int, world_size: int) -> str | None:
    """Return the name that this start has on all ranks; None if rank 0 does not come within the store's
    timeout.

    Args:
        store: what ranks share, over all starts.
        rank: this one.
        world_size: how many there are.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        if world_size > 1:
            arguments = (store.clone(), name, world_size)  # type: ignore[attr-defined]
            threading.Thread(target=_answer, args=arguments, name="start-name", daemon=True).start()
        return name
    question = secrets.token_hex(8)
    store.set(_question(rank), question)
    try:
        name = store.get(_reply(question)).decode()
    except dist.DistNetworkError:
        raise
    except (dist.DistStoreError, RuntimeError):
        return None
    store.set(_heard(name, rank), "")
    return name


def is_first_to_ask(store: dist.Store, rank: int) -> bool:
    """Return whether no lower rank asked: of many that wait in vain, one says so."""
    return not any(store.check([_question(lower)]) for lower in range(1, rank))


def _answer(store: dist.Store, name: str, world_size: int) -> None:
    others = range(1, world_size)
    questions, heard = [_question(rank) for rank in others], [_heard(name, rank) for rank in others]
    answered: set[bytes] = {_NOBODY.encode()}
    # Without a store there is nobody left to answer.
    with suppress(dist.DistError, RuntimeError):
        for key in questions:
            # Reading a key that is not there yet would wait for it.
            store.compare_set(key, "", _NOBODY)
        while not store.check(heard):
            for question in set(store.multi_get(questions)) - answered:
                store.set(_reply(question.decode()), name)
                answered.add(question)
            time.sleep(_PAUSE_SECONDS)


def _question(rank: int) -> str:
    return f"start/question/{rank}"


def _reply(question: str) -> str:
    return f"start/reply/{question}"


def _heard(name: str, rank: int) -> str:
    return f"start/{name}/heard/{rank}"
