"""A folder of data sets as one source: every set, or every language of every set, is a domain."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppl_eval.data.sources import Source
from ppl_eval.data.text_sources import text_files


def suite(
    folder: str,
    levels: int = 1,
    unit: str = "file",
    column: str | None = None,
    bad_lines: str = "error",
) -> Source:
    """Named data sets in one run, with figures for each.

    With ``levels: 1`` every file or folder in ``folder`` is a set, a folder with all files below it. With
    ``levels: 2`` every file or folder in the folder of a set is a language (or a month, or a subject) of it,
    named ``set/language``. The name of a file is its name without suffixes. Names that begin with a dot are
    left out.

    Args:
        folder: the folder of the sets.
        levels: 1 or 2.
        unit: as for ``text_files``, for all sets.
        column: likewise.
        bad_lines: likewise.

    Raises:
        ValueError: if ``levels`` is another, the folder has no set, or two sets have one name.
    """
    root = Path(folder).expanduser()
    if levels not in (1, 2):
        raise ValueError(f"dataset.levels is {levels!r}; it must be 1 (sets) or 2 (sets and languages)")
    if not root.is_dir():
        raise ValueError(f"dataset.folder is {folder!r}, which is no folder (looked from {Path.cwd()})")
    sources: dict[str, Any] = {}
    for name, place in _sets(root, levels):
        if name in sources:
            raise ValueError(f"dataset.folder: {folder} has two sets that are called {name}; rename one")
        files = [str(file) for file in _files(place)]
        sources[name] = text_files(files, unit, column, bad_lines=bad_lines)
    if not sources:
        raise ValueError(f"dataset.folder: {folder} holds no data set")
    return next(iter(sources.values())).merge(sources)


def _sets(root: Path, levels: int) -> Iterator[tuple[str, Path]]:
    for place in _entries(root):
        if levels == 1:
            yield _name(place), place
        elif place.is_file():
            raise ValueError(
                f"dataset.levels is 2, but {place} is a file, not the folder of a set; use levels=1"
            )
        else:
            yield from ((f"{place.name}/{_name(inner)}", inner) for inner in _entries(place))


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    hidden = (path.relative_to(place).parts for path in place.rglob("*"))
    files = [place.joinpath(*parts) for parts in hidden if not any(part.startswith(".") for part in parts)]
    files = sorted(path for path in files if path.is_file())
    if not files:
        raise ValueError(f"dataset.folder: the set {place} holds no file")
    return files


def _name(place: Path) -> str:
    return place.name if place.is_dir() else place.name.split(".")[0]
