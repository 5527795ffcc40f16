"""Files and folders that a reader finds whole or not at all, whatever kills the process that writes them."""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LARGEST_JSON_BYTES = 100_000_000


def keep_to_owner() -> None:
    """From now on, make no file or folder that the group or others may write, whatever the umask allows."""
    os.umask(os.umask(0o077) | 0o022)


@contextmanager
def whole_file(path: Path, mode: str = "w", durable: bool = True) -> Iterator[IO[Any]]:
    """Open a file for writing that takes its name when everything in it is on the disk.

    Until then it has a name that nobody can guess, in the same folder. Where writing fails, it is removed,
    and what was at ``path`` before is still there.

    Args:
        path: the file; replaced if it exists. Its folder must exist.
        mode: ``w`` for text in UTF-8, ``wb`` for bytes.
        durable: wait for the disk; else a machine that loses power may lose the file.

    Yields:
        The open file.
    """
    assert mode in ("w", "wb")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    # The umask can only take rights away, so the group and others never get the right to write.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with open(handle, mode, encoding="utf-8" if mode == "w" else None) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync(path.parent)


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON file whole or not at all: strict JSON, floats to the last digit.

    Raises:
        ValueError: if a value has no place in JSON, such as NaN.
    """
    with whole_file(path, durable=durable) as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that came from outside and holds one object.

    Raises:
        ValueError: if it is damaged, huge, nested too deeply, no object, or has the same key twice.
    """
    try:
        size = path.stat().st_size
        if size > _LARGEST_JSON_BYTES:
            raise ValueError(f"it has {size} bytes, the most that is read is {_LARGEST_JSON_BYTES}")
        return parse_json_object(path.read_bytes())
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read as JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Return the one object in a JSON text.

    Raises:
        ValueError: if it is no JSON, no object, or has the same key twice, of which any could be meant.
        RecursionError: if it is nested too deeply.
    """
    content = json.loads(raw, object_pairs_hook=_object_without_doubles)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object with keys")
    return content


def _object_without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return content


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that takes its name when everything in it is on the disk.

    The caller holds a lock on ``path``: until then the folder is ``<path>.half``, and one that a killed
    process left there is removed first.

    Args:
        path: the folder; replaced if it exists.

    Yields:
        An empty folder to write to.
    """
    half = path.with_name(f"{path.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(mode=0o755)
    try:
        yield half
        for file in (*half.rglob("*"), half):
            _sync(file)
        shutil.rmtree(path, ignore_errors=True)
        half.rename(path)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems have no such operation for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)
