"""What a run is doing, in a small file a host that is read from outside while the run goes on.

    <output_dir>/status/<start>-<node>.json

The first rank of every host writes it every ``EVERY_SECONDS``, from a thread that nobody waits for: a file
system that does not answer delays no window and no watch. A run that succeeds removes its file; one that
fails leaves it, with the cause.
"""

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ppl_eval.config import activity
from ppl_eval.config.files import read_json_object, write_json
from ppl_eval.config.settings import Settings
from ppl_eval.distributed import neighbours
from ppl_eval.distributed.heartbeat import LEFT, make_readable, read_beats
from ppl_eval.distributed.outcome import EXIT_BAD_INPUT, Failure, tell_of_failures
from ppl_eval.distributed.rendezvous import World

FOLDER = "status"
EVERY_SECONDS = 2.0
VERSION = 1
# A run that fails must end, whatever its disk does.
_LAST_WORD_SECONDS = 1.0


class _Seen(NamedTuple):
    beat: bytes
    at: float


class Status:
    """The file of this host, and the thread that writes it.

    Args:
        settings: of the run.
        world: its processes.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self._world = world
        self._path = Path(settings.output_dir) / FOLDER / f"{world.start}-{world.node}.json"
        self._about = {
            "version": VERSION,
            "start": world.start,
            "host": world.host,
            "node": world.node,
            "num_nodes": len(world.nodes),
            "world_size": world.world_size,
            "timeout_seconds": world.timeout.total_seconds(),
            "part": settings.part,
            "began": time.time(),
        }
        self._failure: Failure | None = None
        self._over, self._lock = threading.Event(), threading.Lock()
        self._seen: dict[int, _Seen] = {}
        self._stop_listening = tell_of_failures(self._fail)
        threading.Thread(target=self._write_on, name="status-writer", daemon=True).start()

    def end(self) -> None:
        """Stop; of a run that did not fail, nothing stays."""
        if self._over.is_set():
            return
        self._over.set()
        self._stop_listening()
        if self._failure is None:
            with suppress(OSError), self._lock:
                self._path.unlink(missing_ok=True)
                self._path.parent.rmdir()

    def remove_older(self) -> None:
        """Remove what earlier starts left in this folder."""
        for path in self._path.parent.glob("*.json"):
            if not path.name.startswith(self._world.start):
                with suppress(OSError):
                    path.unlink()

    def _fail(self, failure: Failure) -> None:
        if failure.code == EXIT_BAD_INPUT:
            return  # A refused run leaves nothing: the person is there, and reads why.
        self._failure = self._failure or failure
        last = threading.Thread(target=self._write, daemon=True)
        last.start()
        last.join(_LAST_WORD_SECONDS)

    def _write_on(self) -> None:
        mates = [rank for rank in self._world.mates if rank != self._world.rank]
        store: dist.Store | None = None
        with suppress(dist.DistError, RuntimeError):
            if mates:
                store = self._world.common.clone()  # type: ignore[attr-defined]
                make_readable(store, mates)
        while not self._over.is_set():
            if store is not None:
                try:
                    self._look(read_beats(store, mates))
                except (dist.DistError, RuntimeError):
                    store = None  # What the others do is not known from now on: they look silent.
            self._write()
            self._over.wait(EVERY_SECONDS)

    def _look(self, beats: Mapping[int, bytes]) -> None:
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank].beat != beat:
                self._seen[rank] = _Seen(beat, now)

    def _write(self) -> None:
        now, own = time.monotonic(), {**activity.now.about(), "process": neighbours.identity(), "silent": 0.0}
        ranks: dict[int, dict[str, Any]] = {self._world.rank: own}
        for rank, seen in list(self._seen.items()):
            beat = {"left": True} if seen.beat == LEFT else json.loads(seen.beat)
            ranks[rank] = {**beat, "silent": round(now - seen.at, 1)}
        failure = self._failure
        content = {
            **self._about,
            "written": time.time(),
            "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
            "failure": None if failure is None else {"message": failure.message, "code": failure.code},
        }
        with suppress(OSError), self._lock:
            if not self._over.is_set() or failure is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, content, durable=False)


_current: Status | None = None


def begin(settings: Settings, world: World, resources: ExitStack) -> None:
    """Write this host's file from now on, in place of that of an earlier part of the run.

    Args:
        settings: of the run; its output_dir is this run's own.
        world: its processes; the first of each host writes.
        resources: ends it.
    """
    global _current
    if world.local_rank:
        return
    if _current is not None:
        _current.end()
    _current = Status(settings, world)
    resources.callback(_current.end)
    if world.rank == 0:
        _current.remove_older()


class HostStatus(NamedTuple):
    """The file of one host, as it was found.

    Attributes:
        path: where.
        content: what it says.
        age: seconds since it was written, by the clock of this machine.
    """

    path: Path
    content: dict[str, Any]
    age: float

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        """What each rank of the host was doing."""
        return {int(rank): about for rank, about in self.content["ranks"].items()}

    @property
    def here(self) -> bool:
        """Whether this is the host that wrote it."""
        return self.content["host"] == socket.gethostname()


def read_statuses(output_dir: Path) -> tuple[list[HostStatus], list[str]]:
    """Read the files of the newest start that left any.

    Returns:
        The hosts in order of their first rank, and a line for each file that is damaged.
    """
    found, damaged = [], []
    for path in sorted((output_dir / FOLDER).glob("*.json")):
        try:
            content = read_json_object(path)
            if content["version"] != VERSION:
                raise ValueError(f"its version is {content['version']}, known is {VERSION}")
            host = HostStatus(path, content, time.time() - float(content["written"]))
            if not (host.ranks and all("silent" in about for about in host.ranks.values())):
                raise ValueError("it names no ranks")
            found.append(host)
        except FileNotFoundError:
            continue  # The run just ended.
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged.append(f"{path}: {error}")
    if not found:
        return [], damaged
    newest = min(found, key=lambda host: host.age).content["start"]
    return sorted(
        (host for host in found if host.content["start"] == newest), key=lambda host: min(host.ranks)
    ), damaged
