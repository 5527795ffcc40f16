"""SWEEP.yaml: which configs a sweep runs, under which names.

base: smollm2/135M_ppl            # a path or a shipped name
output_dir: sweeps/quantisers
overrides: {max_windows: 64}      # of all runs
grid:                             # every combination of the axes' levels
  quantizer:                      # named levels, each with any number of overrides
    none: {}
    int8: {quantizer._component_: ..., tags.bits: 8}
  protocol.max_seq_len: [512, 1024]   # a list: the axis is a key, the levels are its values
runs: [{name: best, batch_size: 4}]   # further runs, one by one
compare_to: none-512              # the run that the others are compared with
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval.config.settings import check
from ppl_eval.config.yaml_files import find_config, load_config

_KEYS = ("base", "output_dir", "overrides", "grid", "runs", "compare_to")
_MOST_RUNS = 10_000
# A name is a folder and a line of a table.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: unique in the sweep.
        levels: of the grid's axes; empty for a run that was given by itself.
        config: the whole config.
        folder: its output_dir.
    """

    name: str
    levels: Mapping[str, str]
    config: DictConfig
    folder: Path

    @property
    def tags(self) -> dict[str, Any]:
        """The free columns of the config."""
        return dict(OmegaConf.to_container(self.config.get("tags") or OmegaConf.create({})))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        path: its file.
        output_dir: where everything goes.
        axes: names of the grid's axes.
        runs: in order.
        compare_to: name of the run that the others are compared with; None where none is named.
    """

    path: Path
    output_dir: Path
    axes: tuple[str, ...]
    runs: tuple[Run, ...]
    compare_to: str | None


def read_sweep(path: Path) -> Sweep:
    """Read a sweep and check the config of every run, before any is started.

    Raises:
        ValueError: names the run and the key.
    """
    given = load_config(path)
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"{path}: unknown key {key!r}; a sweep has {', '.join(_KEYS)}")
    for key in ("base", "output_dir"):
        if not isinstance(given.get(key), str):
            raise ValueError(f"{path}: {key} is missing; it must be a text")
    plain = OmegaConf.to_container(given, resolve=False)
    assert isinstance(plain, dict)
    output_dir, common = Path(given.output_dir), _mapping(plain.get("overrides"), f"{path}: overrides")
    base = load_config(find_config(given.base))
    axes = {str(name): _levels(str(name), levels, path) for name, levels in _grid(plain, path).items()}
    runs = []
    for name, levels, overrides in itertools.islice(_combinations(plain, axes, path), _MOST_RUNS + 1):
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{path}: {name!r} cannot name a run: a name has letters, digits and any of _.+=-, at most"
                " 100; levels of a grid can be given names (docs/sweeps.md)"
            )
        folder = output_dir / "runs" / name
        runs.append(Run(name, levels, _config(base, [common, *overrides], folder, name), folder))
    names = [run.name for run in runs]
    if not 0 < len(runs) <= _MOST_RUNS:
        raise ValueError(f"{path} has {len(runs)} runs; it must have at least one and at most {_MOST_RUNS:,}")
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: two runs are called {doubles[0]!r}; give them different names")
    compare_to = given.get("compare_to")
    if compare_to is not None and compare_to not in names:
        raise ValueError(f"{path}: compare_to is {compare_to!r}; it must be one of {', '.join(names[:20])}")
    return Sweep(path, output_dir, tuple(axes), tuple(runs), compare_to)


def _grid(plain: Mapping[Any, Any], path: Path) -> Mapping[Any, Any]:
    return _mapping(plain.get("grid"), f"{path}: grid")


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}; it must be a mapping")
    return value


def _levels(axis: str, levels: Any, path: Path) -> dict[str, dict[Any, Any]]:
    """Return the overrides of each level of an axis, by the level's name."""
    if isinstance(levels, dict) and levels:
        return {
            str(name): _mapping(overrides, f"{path}: grid.{axis}.{name}")
            for name, overrides in levels.items()
        }
    if isinstance(levels, list) and levels:
        named = {_level_name(value): {axis: value} for value in levels}
        if len(named) == len(levels):
            return named
    raise ValueError(
        f"{path}: grid.{axis} must be a list of different values, or names with the overrides of each"
    )


def _level_name(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("_component_", "section").rpartition(".")[2]
    elif isinstance(value, list):
        value = "+".join(map(str, value))
    return str(value) if value is not None else "none"


def _combinations(
    plain: Mapping[Any, Any], axes: Mapping[str, Mapping[str, Any]], path: Path
) -> Iterator[tuple[str, dict[str, str], list[dict[Any, Any]]]]:
    """Walk the runs: name, levels, and overrides from the first to the last."""
    if axes:
        for levels in itertools.product(*axes.values()):
            chosen = dict(zip(axes, levels, strict=True))
            name = "-".join(re.sub(r"[^A-Za-z0-9_.+=]", "_", level) for level in levels)
            yield name, chosen, [axes[axis][level] for axis, level in chosen.items()]
    for number, run in enumerate(plain.get("runs") or []):
        overrides = dict(_mapping(run, f"{path}: runs[{number}]"))
        name = overrides.pop("name", None)
        if name is None:
            raise ValueError(f"{path}: runs[{number}] has no name")
        yield str(name), {}, [overrides]


def _config(base: DictConfig, overrides: list[dict[Any, Any]], folder: Path, name: str) -> DictConfig:
    config = base.copy()
    # Paired differences are what a sweep is for; a base or an override may say otherwise.
    config.setdefault("per_window", True)
    try:
        for key, value in [item for given in overrides for item in given.items()]:
            # A section that names its component is a whole one; another is merged into what is there.
            merge = isinstance(value, dict) and "_component_" not in value
            OmegaConf.update(config, str(key), value, merge=merge, force_add=True)
        config.output_dir = str(folder)
        check(config.copy())
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"run {name}: {str(error).splitlines()[0]}") from error
    return config
