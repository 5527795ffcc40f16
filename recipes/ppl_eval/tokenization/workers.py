"""Worker processes that tokenise, fed over pipes.

Not ``multiprocessing``: its workers import the main script again, which here would be the recipe with torch,
once per core. These import the tokenizer's own library and nothing else, and when the process that started
them is killed, their pipe ends and so do they.
"""

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, islice
from typing import Any

from ppl_eval.tokenization.chunking import Chunk, EncodedChunk, SeamError, encode_chunks
from ppl_eval.tokenization.encoders import Encode
from ppl_eval.tokenization.text_spans import Measure

# A worker takes 60 to 130 MiB, most of it vocabulary; eight of them and their feeder stay below 1 GiB a node,
# and keep up with a disk.
MAX_WORKERS = 8
# Groups of chunks that are not worth starting processes for.
_FEW_GROUPS = 4


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def encode_groups(
    encode: Encode,
    groups: Iterable[list[Chunk]],
    num_workers: int | None = None,
    measure: Measure | None = None,
) -> Iterator[EncodedChunk]:
    """Encode groups of chunks in parallel, in order, with a bounded number of groups in memory.

    Args:
        encode: the tokenizer's; a text too short for several processes, or a tokenizer that cannot be
            pickled, is encoded in this process.
        groups: what to encode.
        num_workers: processes; None for one a core, at most ``MAX_WORKERS``.
        measure: counts bytes and words of the tokens, see ``encode_chunks``.

    Raises:
        SeamError: if a chunk does not fit its context.
    """
    num_workers = num_workers or min(num_cores(), MAX_WORKERS)
    groups = iter(groups)
    first = list(islice(groups, _FEW_GROUPS))
    pickled = _pickled((encode, measure)) if len(first) == _FEW_GROUPS and num_workers > 1 else None
    everything = chain(first, groups)
    if pickled is None:
        for together in everything:
            yield from encode_chunks(encode, together, measure)
        return
    with ExitStack() as stack:
        idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for _ in range(num_workers):
            idle.put(_start(pickled, stack))
        # Entered last, so left first: no thread waits for an answer when the pipes close.
        threads = stack.enter_context(ThreadPoolExecutor(num_workers))
        waiting: deque[Future[list[EncodedChunk]]] = deque()
        for together in everything:
            waiting.append(threads.submit(_ask, idle, together))
            if len(waiting) > 2 * num_workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _pickled(task: tuple[Encode, Measure | None]) -> bytes | None:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def _start(pickled: bytes, stack: ExitStack) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "ppl_eval.tokenization.workers"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    stack.callback(_stop, worker)
    _send(worker.stdin, pickled)
    return worker


def _stop(worker: "subprocess.Popen[bytes]") -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.stdout.close()
    worker.wait()


def _ask(idle: "queue.SimpleQueue[subprocess.Popen[bytes]]", chunks: list[Chunk]) -> list[EncodedChunk]:
    worker = idle.get()
    try:
        _send(worker.stdin, pickle.dumps(chunks))
        answer = _receive(worker.stdout)
    except (BrokenPipeError, EOFError) as error:
        code = worker.wait()
        raise RuntimeError(
            f"a tokeniser process (pid {worker.pid}) ended with exit code {code}; its messages are above. "
            "A negative code is a signal: -9 mostly means that the machine ran out of memory"
        ) from error
    finally:
        idle.put(worker)
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _send(pipe: Any, content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little"))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    header = pipe.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(pipe.read(int.from_bytes(header, "little")))


def _serve(inbox: Any, outbox: Any) -> None:
    encode, measure = _receive(inbox)
    while True:
        try:
            chunks = _receive(inbox)
        except EOFError:
            return
        try:
            answer: Any = encode_chunks(encode, chunks, measure)
        except (SeamError, ValueError, TypeError, RuntimeError) as error:
            answer = error
        _send(outbox, pickle.dumps(answer))


if __name__ == "__main__":
    # Whatever a tokenizer prints must not end up between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers)
