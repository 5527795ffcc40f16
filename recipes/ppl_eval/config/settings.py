"""The config's keys: their types, defaults and allowed values, checked one by one. The only reader of this
project's own keys."""

import importlib.util
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval.config import own_code, parts
from ppl_eval.config import reference as other_model
from ppl_eval.config.components import check_arguments, check_component, check_inside, suggest
from ppl_eval.config.flags import NO_FLAGS, Flags, refuse_flags_in, take_flags
from ppl_eval.config.yaml_files import find_config, load_config, override

_INTERPOLATION = re.compile(r"\$\{\s*([\w.]+)")


def _key(
    default: Any,
    *,
    allowed: tuple[str, ...] = (),
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    return field(default=default, metadata={"allowed": allowed, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class Aggregation:
    """How sums are added up (docs/exactness.md).

    Attributes:
        precision: accumulation of the NLL; ``auto`` is float64 above 10^6 tokens, else float32.
        topology: of the reduction over ranks.
    """

    precision: str = _key("exact", allowed=("exact", "float64", "float32", "auto"))
    topology: str = _key("flat", allowed=("flat", "hierarchical"))


@dataclass(frozen=True)
class Settings:
    """A checked config: an attribute for every key (docs/config.md says what each does).

    Attributes:
        config: the whole config, interpolations resolved.
        written: the values of all keys as plain Python, interpolations as they were written: equal on all
            hosts even where a path is not.
        notes: what was filled in that the config left open.
    """

    config: DictConfig
    written: Mapping[str, Any]
    output_dir: str
    model: DictConfig
    tokenizer: DictConfig | None
    checkpointer: DictConfig
    dataset: DictConfig
    protocol: DictConfig
    quantizer: DictConfig | None = None
    reference: DictConfig | None = None
    metric_logger: DictConfig | None = None
    tags: DictConfig | None = None
    aggregation: Aggregation = field(default_factory=Aggregation)
    # torchtune's set_seed takes what NumPy takes.
    seed: int = _key(42, at_least=0, at_most=2**32 - 1)
    seed_check: str = _key("warn", allowed=("warn", "error", "ignore"))
    config_check: str = _key("error", allowed=("error", "warn", "off"))
    device: str | None = "cpu"
    dtype: str | None = _key("bf16", allowed=("bf16", "fp16", "fp32", "fp64"))
    batch_size: int = _key(1, at_least=1, at_most=2**31)
    max_windows: int | None = _key(None, at_least=1, at_most=2**62)
    max_logits_mib: float = _key(64, at_least=0.001)
    softmax: str = _key("exact", allowed=("exact", "torch"))
    schedule: str = _key("auto", allowed=("auto", "static", "dynamic"))
    part: str | None = None
    per_window: bool = False
    per_document: bool = False
    per_token: bool = False
    report: bool = False
    position_buckets: int | None = _key(None, at_least=1, at_most=2**20)
    resume: str = _key("auto", allowed=("auto", "never", "require"))
    backend: str | None = None
    timeout_seconds: float = _key(180, at_least=1)
    baseline: str | None = None
    baseline_tolerance: float = _key(0, at_least=0)
    cross_check: int | None = _key(None, at_least=1, at_most=2**62)
    compile: bool = False
    data_parallel_replicate_dim: int | None = _key(None, at_least=-1)
    data_parallel_shard_dim: int = _key(1, at_least=-1)
    context_parallel_dim: int = _key(1, at_least=1)
    tensor_parallel_dim: int = _key(1, at_least=1)
    tensor_parallel_plan: DictConfig | None = None
    fsdp_reshard_after_forward: bool = True
    fsdp_cpu_offload: bool = False
    nan: str = _key("error", allowed=("error", "exclude"))
    debug_nan: bool = False
    log_level: str = _key("INFO", allowed=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_peak_memory_stats: bool = False
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the config as plain Python, as it was given."""
        plain = OmegaConf.to_container(self.config, resolve=True)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}


@dataclass(frozen=True)
class Key:
    """What is known of one key.

    Attributes:
        types: what its value may be; ``DictConfig`` for a section.
        default: its value where the config leaves it out; ``MISSING`` if it must be there.
        allowed: the values, where they are few.
        at_least: the smallest number allowed.
        at_most: the largest number allowed.
    """

    types: tuple[type, ...]
    default: Any
    allowed: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None


def _keys_of(kind: type) -> dict[str, Key]:
    hints = typing.get_type_hints(kind)
    keys = {}
    for spec in fields(kind):
        if spec.name in ("config", "written", "notes"):
            continue
        hint = hints[spec.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        # A section of keys is given as a mapping.
        kinds = tuple(DictConfig if kind is Aggregation else kind for kind in kinds)
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        keys[spec.name] = Key(kinds + ((int,) if float in kinds else ()), default, **spec.metadata)
    return keys


KEYS = _keys_of(Settings)
AGGREGATION_KEYS = _keys_of(Aggregation)
_NO_COMPONENTS = ("aggregation", "reference", "tags")
SECTIONS = tuple(name for name, key in KEYS.items() if DictConfig in key.types and name not in _NO_COMPONENTS)
USAGE = f"""\
usage: distributed_ppl_eval --config <path or shipped name> [key=value ...]

Perplexity of a language model, the same bits on one process and on a thousand.

  tune run distributed_ppl_eval --config smollm2/135M_ppl
  tune run --nproc_per_node 8 distributed_ppl_eval --config llama3_1/8B_ppl batch_size=4
  tune run distributed_ppl_eval --config my.yaml protocol.max_seq_len=512 ~quantizer

key=value overrides a key of the config, ~key removes one. Keys: {", ".join(KEYS)}.
docs/config.md says what each means. `ppl-eval ls` lists the shipped configs, `ppl-eval --help` the rest.\
"""
_TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    DictConfig: "a section with a _component_",
    type(None): "null",
}


def read_settings(argv: Sequence[str]) -> Settings:
    """Read ``--config NAME [key=value | ~key ...]``.

    Args:
        argv: arguments of the recipe, without the program's name.

    Raises:
        ValueError: for anything the person has to mend, with the key's name and the nearest real one.
    """
    arguments = list(argv)
    if len(arguments) < 2 or arguments[0] != "--config":
        raise ValueError(USAGE.partition("\n")[0] + "; `ppl-eval ls` lists the shipped configs")
    return read_config(load_config(find_config(arguments[1])), arguments[2:])


def read_config(config: DictConfig, arguments: Sequence[str]) -> Settings:
    """Apply ``key=value`` and ``~key`` arguments to a config, and check it.

    Raises:
        ValueError: for anything the person has to mend, with the key's name and the nearest real one.
    """
    flags, overrides = take_flags(arguments)
    own_code.allow(flags.allow_components)
    return check(override(config, overrides, SECTIONS), flags)


def check(config: DictConfig, flags: Flags = NO_FLAGS) -> Settings:
    """Check every key at the top, where every component comes from, and its arguments by name.

    Components are not imported here, apart from this project's own: this must fail fast.

    Args:
        config: the config with all overrides; changed in place.
        flags: what only the command line may say.

    Raises:
        ValueError: names the key, what was found, and what is allowed.
    """
    # Helper keys are welcome where something refers to them, as torchtune's configs do with `${output_dir}`.
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    used = set(_INTERPOLATION.findall(OmegaConf.to_yaml(config)))
    helpers = {reference.split(".")[0] for reference in used}
    for key in _missing(written):
        raise ValueError(f"{key} is ???, which stands for a value still to be given; give it one")
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"the config refers to something that is not there: {str(error).splitlines()[0]}"
        ) from error
    refuse_flags_in(config)
    for name in config:
        if name not in KEYS and name not in helpers:
            raise ValueError(f"unknown key {name!r}{suggest(str(name), KEYS)}")
    values = {name: _check_value(name, key, config) for name, key in KEYS.items()}
    given = config.get("aggregation", DictConfig({}))
    for name in given:
        if name not in AGGREGATION_KEYS:
            raise ValueError(
                f"unknown key 'aggregation.{name}'{suggest(str(name), AGGREGATION_KEYS, 'aggregation.')}"
            )
    aggregation = {
        name: _check_value(name, key, given, "aggregation.") for name, key in AGGREGATION_KEYS.items()
    }
    for name, section in sections_of(values):
        check_component(name, section)
    _check_together(values)
    if values["part"] is not None:
        values["output_dir"] = str(Path(values["output_dir"]) / parts.folder_name(values["part"]))
    values["aggregation"] = Aggregation(**aggregation)
    if flags.allow_unsafe_pickle:
        values["checkpointer"].allow_unsafe_pickle = True
    written.update(flags.written())
    defaults = {name: key.default for name, key in KEYS.items() if key.default is not MISSING}
    defaults["aggregation"] = aggregation
    return Settings(
        config=config, written={**defaults, **{str(key): value for key, value in written.items()}}, **values
    )


def _check_together(values: Mapping[str, Any]) -> None:
    """Refuse values that exclude each other, and tags that are no columns."""
    for name, value in (values["tags"] or {}).items():
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"tags.{name} is {value!r}; a tag is a number, a text, true or false")
    if values["softmax"] == "torch" and values["tensor_parallel_dim"] > 1:
        raise ValueError(
            "softmax is 'torch', which needs whole rows of logits, and tensor_parallel_dim splits them; use"
            " softmax=exact or tensor_parallel_dim=1"
        )
    if values["debug_nan"] and values["compile"] and values["data_parallel_shard_dim"] != 1:
        raise ValueError(
            "debug_nan watches every forward where data_parallel_shard_dim divides the model, which a"
            " compiled one does not allow; use compile=false"
        )
    if values["part"] is not None and values["report"]:
        raise ValueError("report is of the whole: ppl-eval report makes it of what ppl-eval merge writes")
    if values["part"] is not None and values["baseline"] is not None:
        raise ValueError("part and baseline cannot go together: only the whole of all parts is comparable")


def check_built(settings: Settings) -> None:
    """Import all components that the run will build, and check them: the last is built after scoring.

    Raises:
        ValueError: for one that does not exist, may not stand there, or does not take its arguments.
    """
    if settings.report and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "report is true, and there is no matplotlib: pip install 'distributed_ppl_eval[report]'"
        )
    for name, section in sections_of(vars(settings)):
        plain = OmegaConf.to_container(section, resolve=True)
        assert isinstance(plain, dict)
        check_inside(name, plain)
        # Of these two only the name is read.
        if name.removeprefix(other_model.PREFIX) not in ("checkpointer", "quantizer"):
            check_arguments(name, plain)


def _missing(value: Any, name: str = "") -> Iterator[str]:
    """Walk the keys whose value is OmegaConf's mark for a missing one."""
    if value == "???":
        yield name
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _missing(item, f"{name}.{key}" if name else str(key))


def sections_of(values: Mapping[str, Any]) -> Iterator[tuple[str, DictConfig]]:
    """Walk the sections with a component that a config has, by key; those of the reference too."""
    for name in SECTIONS:
        if values[name] is not None:
            yield name, values[name]
    yield from other_model.sections_of(values["reference"])


def _check_value(name: str, key: Key, config: DictConfig, prefix: str = "") -> Any:
    if name not in config:
        if key.default is MISSING:
            raise ValueError(f"the config has no {prefix}{name}; it must be {_describe(key)}")
        return key.default
    value = config[name]
    # bool is an int to Python, but `batch_size: true` is a mistake.
    fits = isinstance(value, key.types) and (not isinstance(value, bool) or bool in key.types)
    if not fits or (key.allowed and value is not None and value not in key.allowed):
        hint = suggest(value, key.allowed) if isinstance(value, str) and key.allowed else ""
        raise ValueError(f"{prefix}{name} is {value!r}; it must be {_describe(key)}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{prefix}{name} is {value!r}; it must be a finite number")
    if key.at_least is not None and value is not None and value < key.at_least:
        raise ValueError(f"{prefix}{name} is {value!r}; it must be at least {key.at_least}")
    if key.at_most is not None and value is not None and value > key.at_most:
        raise ValueError(f"{prefix}{name} is {value!r}; it must be at most {key.at_most}")
    return value


def _describe(key: Key) -> str:
    if key.allowed:
        return "one of " + ", ".join(key.allowed)
    named = [_TYPE_NAMES[kind] for kind in key.types if not (kind is int and float in key.types)]
    return " or ".join(named)
