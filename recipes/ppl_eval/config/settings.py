"""The config: read from YAML and command line, checked key by key. The only reader of this project's own
keys."""

import importlib.resources
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval.config.components import MOVED, check_arguments, suggest

_INTERPOLATION = re.compile(r"\$\{\s*([\w.]+)")
_REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """One key at the top of a config.

    Attributes:
        types: what its value may be; ``DictConfig`` for a section.
        default: its value where the config leaves it out; ``_REQUIRED`` if it must be there.
        allowed: the values, where they are few.
        at_least: the smallest number allowed.
    """

    types: tuple[type, ...]
    default: Any = _REQUIRED
    allowed: tuple[Any, ...] = ()
    at_least: float | None = None


_NONE = type(None)
KEYS: dict[str, Key] = {
    "output_dir": Key((str,)),
    "model": Key((DictConfig,)),
    "tokenizer": Key((DictConfig,)),
    "checkpointer": Key((DictConfig,)),
    "dataset": Key((DictConfig,)),
    "protocol": Key((DictConfig,)),
    "quantizer": Key((DictConfig, _NONE), None),
    "metric_logger": Key((DictConfig, _NONE), None),
    "aggregation": Key((DictConfig,), OmegaConf.create({})),
    "seed": Key((int,), 42, at_least=0),
    "seed_check": Key((str,), "warn", ("warn", "error", "ignore")),
    "config_check": Key((str,), "error", ("error", "warn", "off")),
    "device": Key((str,), "cpu"),
    "dtype": Key((str,), "bf16", ("bf16", "fp16", "fp32", "fp64")),
    "batch_size": Key((int,), 1, at_least=1),
    "max_windows": Key((int, _NONE), None, at_least=1),
    "max_logits_mib": Key((int, float), 64, at_least=0.001),
    "per_window": Key((bool,), False),
    "per_document": Key((bool,), False),
    "position_buckets": Key((int, _NONE), None, at_least=1),
    "backend": Key((str, _NONE), None),
    "timeout_seconds": Key((int, float), 180, at_least=1),
    "baseline": Key((str, _NONE), None),
    "baseline_tolerance": Key((int, float), 0, at_least=0),
    "compile": Key((bool,), False),
    "data_parallel_replicate_dim": Key((int, _NONE), None, at_least=-1),
    "data_parallel_shard_dim": Key((int,), 1, at_least=-1),
    "context_parallel_dim": Key((int,), 1, at_least=1),
    "tensor_parallel_dim": Key((int,), 1, at_least=1),
    "tensor_parallel_plan": Key((DictConfig, _NONE), None),
    "fsdp_reshard_after_forward": Key((bool,), True),
    "fsdp_cpu_offload": Key((bool,), False),
    "log_level": Key((str,), "INFO", ("DEBUG", "INFO", "WARNING", "ERROR")),
    "log_peak_memory_stats": Key((bool,), False),
}
AGGREGATION_KEYS: dict[str, Key] = {
    "precision": Key((str,), "exact", ("exact", "float64", "float32", "auto")),
    "topology": Key((str,), "flat", ("flat", "hierarchical")),
}
_TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    DictConfig: "a section with a _component_",
    _NONE: "null",
}


@dataclass(frozen=True)
class Settings:
    """A checked config.

    Attributes:
        config: the whole config, interpolations resolved.
        values: the value of every key of ``KEYS``, defaults filled in.
        written: the same as plain Python, interpolations as they were written: equal on all hosts even where
            a path is not.
    """

    config: DictConfig
    values: Mapping[str, Any]
    written: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        """``settings.batch_size`` is the value of the key ``batch_size``."""
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def as_dict(self) -> dict[str, Any]:
        """The config as plain Python, as it was given."""
        plain = OmegaConf.to_container(self.config, resolve=True)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}


def read_settings(argv: Sequence[str]) -> Settings:
    """Read ``--config NAME [key=value | ~key ...]``.

    Args:
        argv: arguments of the recipe, without the program's name.

    Raises:
        ValueError: for anything the person has to mend, with the key's name and the nearest real one.
    """
    arguments = list(argv)
    if len(arguments) < 2 or arguments[0] != "--config":
        raise ValueError(
            "usage: distributed_ppl_eval --config <path or shipped name> [key=value ...]; `ppl-eval ls` lists"
            " the shipped configs"
        )
    path = find_config(arguments[1])
    try:
        config = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the config {path}: {error}") from error
    except Exception as error:  # yaml's own errors have no common base that OmegaConf exports
        raise ValueError(f"the config {path} is not valid YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"the config {path} must be a mapping of keys to values")
    return check(override(config, arguments[2:]))


def shipped_configs() -> dict[str, Path]:
    """Name to file of every config that comes with this package."""
    root = Path(str(importlib.resources.files("ppl_eval.configs")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def find_config(name: str) -> Path:
    """The file that ``--config`` means: a path, else a shipped name.

    Raises:
        ValueError: if it is neither.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs()
    key = name.removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    raise ValueError(
        f"no config is called {name!r}: no such file, and no shipped config{suggest(key, shipped)};"
        " `ppl-eval ls` lists them"
    )


def override(config: DictConfig, arguments: Iterable[str]) -> DictConfig:
    """Apply ``key=value`` and ``~key`` arguments as torchtune does: naming a section sets its
    ``_component_``.

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
        if _names_component(config, key, value):
            key += "._component_"
        try:
            change = OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"])
            config = OmegaConf.merge(config, change)  # type: ignore[assignment]
        except Exception as error:
            raise ValueError(f"cannot apply the override {argument!r}: {error}") from error
    return config


def _names_component(config: DictConfig, key: str, value: str) -> bool:
    """Whether ``key=value`` gives a section's component by its dotted path alone."""
    if value in ("", "null", "None") or value.lstrip().startswith("{"):
        return False
    current = OmegaConf.select(config, key)
    if isinstance(current, DictConfig):
        return "_component_" in current
    return current is None and key in KEYS and DictConfig in KEYS[key].types


def check(config: DictConfig) -> Settings:
    """Check every key at the top and every component's arguments by name.

    Components are not imported here, apart from this project's own: this must fail fast.

    Raises:
        ValueError: names the key, what was found, and what is allowed.
    """
    # Helper keys are welcome where something refers to them, as torchtune's configs do with `${output_dir}`.
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    used = set(_INTERPOLATION.findall(OmegaConf.to_yaml(config)))
    helpers = {reference.split(".")[0] for reference in used}
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"the config refers to something that is not there: {str(error).splitlines()[0]}"
        ) from error
    for name in config:
        if name not in KEYS and name not in helpers:
            raise ValueError(f"unknown key {name!r}{suggest(str(name), KEYS)}")
    values = {name: _check_value(name, key, config) for name, key in KEYS.items()}
    aggregation = values["aggregation"]
    for name in aggregation:
        if name not in AGGREGATION_KEYS:
            raise ValueError(
                f"unknown key 'aggregation.{name}'{suggest(str(name), AGGREGATION_KEYS, 'aggregation.')}"
            )
    values["aggregation"] = {
        name: _check_value(name, key, aggregation, "aggregation.") for name, key in AGGREGATION_KEYS.items()
    }
    for name, value in values.items():
        if isinstance(value, DictConfig):
            component = value.get("_component_")
            if not isinstance(component, str):
                raise ValueError(f"{name}._component_ is missing: the dotted path of what to build")
            value._component_ = component = MOVED.get(component, component)
            if component.startswith("ppl_eval."):
                check_arguments(name, value)
            elif importlib.util.find_spec(component.split(".")[0] or "?") is None:
                raise ValueError(
                    f"{name}._component_ is {component!r}, but there is no module {component.split('.')[0]!r}"
                )
    defaults = {name: key.default for name, key in KEYS.items() if key.default is not _REQUIRED}
    defaults["aggregation"] = values["aggregation"]
    return Settings(config, values, {**defaults, **{str(key): value for key, value in written.items()}})


def _check_value(name: str, key: Key, config: DictConfig, prefix: str = "") -> Any:
    if name not in config:
        if key.default is _REQUIRED:
            raise ValueError(f"the config has no {prefix}{name}; it must be {_describe(key)}")
        return key.default
    value = config[name]
    # bool is an int to Python, but `batch_size: true` is a mistake.
    fits = isinstance(value, key.types) and (not isinstance(value, bool) or bool in key.types)
    if not fits or (key.allowed and value not in key.allowed):
        hint = suggest(value, key.allowed) if isinstance(value, str) and key.allowed else ""
        raise ValueError(f"{prefix}{name} is {value!r}; it must be {_describe(key)}{hint}")
    if key.at_least is not None and value is not None and value < key.at_least:
        raise ValueError(f"{prefix}{name} is {value!r}; it must be at least {key.at_least}")
    return value


def _describe(key: Key) -> str:
    if key.allowed:
        return "one of " + ", ".join(map(str, key.allowed))
    return " or ".join(_TYPE_NAMES[kind] for kind in key.types)
