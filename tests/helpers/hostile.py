"""A working directory full of modules that leave a mark when they run, and inputs that try to run them."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "from pathlib import Path\nPath({mark!r}).touch()\n"
SHADOWS = ("torchvision", "wandb", "my_module", "triton")


def write_modules(folder: Path, mark: Path, more: tuple[str, ...] = ()) -> None:
    """Modules that touch ``mark`` when they are imported; ``my_module.run`` touches it when it is called."""
    for name in (*SHADOWS, *more):
        (folder / f"{name}.py").write_text(
            MARK.format(mark=str(mark)) + "def run(*_, **__):\n    raise SystemExit('ran')\n"
        )


def children() -> set[int]:
    """Processes that this one has started and that still live."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def tree(folder: Path) -> set[str]:
    """All files under a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def nested(depth: int, inner: str = "1") -> str:
    """JSON that is nested so deep."""
    return '{"a":' * depth + inner + "}" * depth


def safetensors_bytes(entries: dict[str, Any], data: bytes = bytes(64)) -> bytes:
    """A safetensors file with this header, whatever it says."""
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


def unlisted(before: set[str], after: set[str]) -> Iterator[str]:
    """Files that are new and that no refused run may leave; a lock is the sign that one began."""
    for name in sorted(after - before):
        if os.path.basename(name) not in (".lock",):
            yield name
