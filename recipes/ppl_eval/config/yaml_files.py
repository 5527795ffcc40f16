"""Config files: found by path or shipped name, read as YAML, changed by overrides."""

import importlib.resources
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from ppl_eval.config.components import suggest

_MOST_VALUES = 100_000
# Whole numbers that YAML 1.1 reads in another base: 010 is 8, 1:30 is 90. Nobody means them.
_ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|0[xXbBoO]\w+|[0-9][0-9_]*(:[0-5]?[0-9])+)")


def shipped_configs() -> dict[str, Path]:
    """Name to file of every config that comes with this package."""
    root = Path(str(importlib.resources.files("ppl_eval.configs")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def find_config(name: str) -> Path:
    """Find the file that ``--config`` means: a path, else a shipped name.

    Raises:
        ValueError: if it is neither.
    """
    try:
        if Path(name).is_file():
            return Path(name)
    except (OSError, ValueError):
        pass  # Too long for a file name, or with a NUL in it.
    shipped = shipped_configs()
    key = name.removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    raise ValueError(
        f"no config is called {shown!r}: no such file, and no shipped config{suggest(key[:200], shipped)};"
        " `ppl-eval ls` lists them"
    )


def load_config(path: Path) -> DictConfig:
    """Read a YAML file.

    Raises:
        ValueError: if it cannot be read, is no mapping, grows without bound through its aliases, or holds a
            number that YAML reads in another base.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the config {path}: {error}") from error
    try:
        composed = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_bomb(composed, path)
        for node in _scalars(composed):
            _refuse_odd_number(node.value, f"the config {path}, line {node.start_mark.line + 1}")
        config = OmegaConf.create(text)
    except ValueError:
        raise
    except Exception as error:  # yaml's and OmegaConf's own errors have no common base
        raise ValueError(f"the config {path} is not valid YAML: {error}") from error
    if not isinstance(config, DictConfig) or not text.strip():
        raise ValueError(f"the config {path} must be a mapping of keys to values")
    return config


def override(config: DictConfig, arguments: Iterable[str], sections: Container[str]) -> DictConfig:
    """Apply ``key=value`` and ``~key`` arguments as torchtune does: naming a section sets its
    ``_component_``.

    Args:
        config: what to change.
        arguments: the overrides.
        sections: keys at the top that take a component, so that their name alone may be given one.

    Raises:
        ValueError: for an argument of another form, or a ``~key`` that is not there.
    """
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("~"):
            parent, _, leaf = key[1:].rpartition(".")
            section = OmegaConf.select(config, parent) if parent else config
            if not isinstance(section, DictConfig) or leaf not in section:
                raise ValueError(f"{argument}: the config has no key {key[1:]!r} to remove")
            del section[leaf]
            continue
        if not equals or not key or key.startswith("-"):
            raise ValueError(
                f"cannot read the argument {argument!r}; overrides have the form key=value, or ~key to remove"
                " a key"
            )
        _refuse_odd_number(value, f"the override {argument!r}")
        if value.strip() == "???":
            # OmegaConf would leave the value as it was.
            raise ValueError(f"{key} is ???, which stands for a value still to be given; give it one")
        if _names_component(config, key, value, sections):
            key += "._component_"
        try:
            change = OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"])
            config = OmegaConf.merge(config, change)  # type: ignore[assignment]
        except Exception as error:
            raise ValueError(f"cannot apply the override {argument!r}: {error}") from error
    return config


def _refuse_bomb(node: yaml.Node | None, path: Path) -> None:
    """Refuse aliases of aliases: a kilobyte of them stands for more values than memory holds."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # Of a node inside itself, which OmegaConf refuses.
            if isinstance(node, yaml.MappingNode):
                sizes[id(node)] += sum(size(key) + size(value) for key, value in node.value)
            elif isinstance(node, yaml.SequenceNode):
                sizes[id(node)] += sum(map(size, node.value))
        return sizes[id(node)]

    if node is not None and size(node) > _MOST_VALUES:
        raise ValueError(
            f"the config {path} stands for {size(node)} values once its aliases are put in; the most that is"
            f" read is {_MOST_VALUES}"
        )


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Walk the plain whole numbers of a YAML document."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:int" and node.style is None:
            yield node
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _scalars(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item)


def _refuse_odd_number(text: str, where: str) -> None:
    if _ODD_NUMBER.fullmatch(text):
        value = yaml.safe_load(text)
        if isinstance(value, int):
            raise ValueError(
                f"{where}: YAML reads {text} as {value}; write {value} if that is meant, else the number"
                " without the leading zero or colon, or quoted if it is text"
            )


def _names_component(config: DictConfig, key: str, value: str, sections: Container[str]) -> bool:
    """Return whether ``key=value`` gives a section's component by its dotted path alone."""
    if value in ("", "null", "None") or value.lstrip().startswith("{"):
        return False
    current = OmegaConf.select(config, key)
    if isinstance(current, DictConfig):
        return "_component_" in current
    return current is None and key in sections
