"""Whose code a config may name besides this project's and torchtune's, and what the working directory may
shadow: nothing.

A config is data that people pass around. What it names runs only if it is of a package that the person who
starts the run allowed on the command line.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Judged by section (see kinds.py), whoever allows what.
JUDGED = ("ppl_eval", "torchtune", "torchao", "torch", "transformers")
_allowed: tuple[str, ...] = ()
_guarded = False


def allow(packages: Iterable[str]) -> None:
    """Let configs name components of these packages from now on, and of no others.

    Raises:
        ValueError: for a name that is no package, or one whose components are judged by section or are
            Python's own.
    """
    global _allowed
    chosen = tuple(packages)
    for name in chosen:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"allow_components has {name!r}; it must be names of packages, such as"
                " allow_components=my_package or allow_components=my_package,other"
            )
        root = name.split(".")[0]
        if root in JUDGED or root in sys.stdlib_module_names:
            raise ValueError(
                f"allow_components has {name!r}; name a package of your own: what {root} offers is allowed"
                " where a section needs it, and only there"
            )
    _allowed = chosen
    mind_working_directory()


def is_allowed(path: str) -> bool:
    """Return whether a dotted path is in a package that the command line allowed."""
    return any(path == package or path.startswith(f"{package}.") for package in _allowed)


def guard_working_directory() -> None:
    """From now on, let no module be found in the working directory unless own code is allowed.

    For programs; whoever imports this package keeps the search path that they have.
    """
    global _guarded
    _guarded = True
    mind_working_directory()


def mind_working_directory() -> None:
    """Keep the working directory from being searched for modules, or search it last if own code is allowed.

    ``python -m`` puts it first, so that a ``json.py`` there would take the place of Python's; `tune run` and
    torchtune put it last, where it would stand in for any optional package that is not installed.
    """
    here = Path.cwd()
    if _guarded:
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        kept = {str(Path(entry)) for entry in named if entry} | {str(Path(__file__).parents[2])}
        sys.path[:] = [entry for entry in sys.path if entry in kept or not _is_here(entry, here)]
    if _allowed and not any(_is_here(entry, here) for entry in sys.path):
        sys.path.append(str(here))


def _is_here(entry: str, here: Path) -> bool:
    with suppress(OSError):
        return Path(entry or ".").resolve() == here.resolve()
    return False
