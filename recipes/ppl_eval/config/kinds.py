"""What each section of a config may name: where it is defined, and what it makes.

A dotted path proves nothing: ``torch.os.system`` is one. So a component is judged by the module that defines
it and by the methods of what it returns, for every ``_component_`` at every depth.
"""

import functools
import importlib.util
import keyword
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ppl_eval.config import own_code


class Kind(NamedTuple):
    """What a section may name.

    Attributes:
        what: for messages.
        packages: the component is named in one of these, and defined in one of them.
        members: methods of what it makes; empty where only its name is read and nothing is called.
        or_members: what else it may have instead.
    """

    what: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    or_members: tuple[str, ...] = ()


KINDS = {
    "model": Kind(
        "a model builder",
        ("torchtune.models", "ppl_eval.models"),
        ("forward", "named_parameters"),
        ("hidden", "head"),
    ),
    "tokenizer": Kind(
        "a tokenizer", ("torchtune.models", "torchtune.modules.transforms.tokenizers"), ("encode", "decode")
    ),
    "dataset": Kind("a source of data", ("ppl_eval.data",), ("identify", "write")),
    "torchtune dataset": Kind("a dataset of torchtune", ("torchtune.datasets",), ("__getitem__", "__len__")),
    "checkpointer": Kind("a checkpointer", ("torchtune.training",), ("load_checkpoint", "save_checkpoint")),
    "quantizer": Kind(
        "a quantiser",
        ("torchtune.training.quantization", "torchao.quantization", "ppl_eval.quantization"),
        (),
    ),
    "protocol": Kind("a protocol", ("ppl_eval.protocols",), ("num_windows", "locate", "num_targets")),
    "metric_logger": Kind("a metric logger", ("torchtune.training.metric_logging",), ("log_dict", "close")),
    "tensor_parallel_plan": Kind(
        "a plan for tensor parallelism", ("torchtune.models", "ppl_eval.parallel"), ("_apply",)
    ),
    "part": Kind(
        "a transform or prompt template",
        ("torchtune.data", "torchtune.datasets", "torchtune.models"),
        ("__call__",),
    ),
}
# (kind of a section, key in it) -> kind of what stands there; "*" is any key. The rest is "part".
_INSIDE = {
    ("dataset", "sources"): "sources",
    ("sources", "*"): "dataset",
    ("dataset", "dataset"): "torchtune dataset",
    ("quantizer", "calibration"): "calibration",
    ("calibration", "dataset"): "dataset",
}
# torchtune imports and calls a text that is given for these.
_DOTTED_ARGUMENTS = ("prompt_template",)
# Readers of the datasets library that unpickle.
_UNPICKLING_READERS = ("pandas",)


class Named(NamedTuple):
    """A component that a config names: the key it came from, the kind its place needs, and its path."""

    key: str
    kind: str
    path: Any


def kind_of_section(section: str) -> str:
    """Return the kind of component that a key of the config needs."""
    if section == "quantizer.calibration.dataset":
        return "dataset"
    kind = section.removeprefix("reference.").split(".")[0]
    assert kind in KINDS, section
    return kind


def components_in(key: str, kind: str, value: Any) -> Iterator[Named]:
    """Walk every component that a section names, at every depth.

    Raises:
        ValueError: for an argument that makes a library run code from a data set.
    """
    if isinstance(value, Mapping):
        if "_component_" in value:
            yield Named(f"{key}._component_", kind, value["_component_"])
        for name, item in value.items():
            where = f"{key}.{name}"
            _refuse_code_in_data(where, str(name), item, kind)
            if name in _DOTTED_ARGUMENTS and isinstance(item, str):
                yield Named(where, "part", item)
            inside = _INSIDE.get((kind, str(name))) or _INSIDE.get((kind, "*")) or "part"
            yield from components_in(where, inside, item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from components_in(f"{key}.{index}", "part", item)


def _refuse_code_in_data(where: str, name: str, value: Any, kind: str) -> None:
    if name == "trust_remote_code" and value not in (False, None):
        raise ValueError(
            f"{where} is {value!r}; code that comes with data is never run here: remove the key, and convert"
            " the data set to files without code (parquet, jsonl)"
        )
    reads = kind in ("dataset", "torchtune dataset") and name in ("source", "name")
    if reads and value in _UNPICKLING_READERS:
        raise ValueError(
            f"{where} is {value!r}, whose files are pickles, which run code when they are read; convert them"
            " to parquet"
        )


def check_name(named: Named) -> None:
    """Check where a component's path leads, without importing anything.

    Raises:
        ValueError: if it is no dotted path, or one to a place that its section may not name.
    """
    key, path = named.key, named.path
    if not isinstance(path, str) or not _is_dotted(path):
        raise ValueError(
            f"{key} is {path!r}; it must be the dotted path of a function or class, such as"
            " ppl_eval.data.text_files"
        )
    kind = KINDS.get(named.kind, KINDS["part"])
    if own_code.is_allowed(path) or _is_under(path, kind.packages):
        return
    root = path.split(".")[0]
    places = ", ".join(kind.packages)
    found = f"{key} is {path!r}"
    if root not in own_code.JUDGED and root not in sys.builtin_module_names:
        if root not in sys.modules and importlib.util.find_spec(root) is None:
            found += f", but there is no module {root!r}"
        raise ValueError(
            f"{found}; it must be {kind.what} from {places}. Code of your own runs only if the command line"
            f" says so: allow_components={root}"
        )
    raise ValueError(f"{found}; it must be {kind.what} from {places}")


def check_object(named: Named, component: Any) -> None:
    """Check what a path led to.

    Raises:
        ValueError: if it is no function or class, is defined outside what its section may name, or makes
            something else than its section needs.
    """
    kind = KINDS.get(named.kind, KINDS["part"])
    inner = component.func if isinstance(component, functools.partial) else component
    if not isinstance(inner, type | types.FunctionType):
        raise ValueError(
            f"{named.key} is {named.path!r}, a {type(component).__name__}; it must be {kind.what}: a function"
            " or class"
        )
    home = inner.__module__
    if own_code.is_allowed(home):
        return
    if not _is_under(home, kind.packages):
        raise ValueError(
            f"{named.key} is {named.path!r}, which is defined in {home}; it must be {kind.what} from"
            f" {', '.join(kind.packages)}"
        )
    made = _made_by(inner)
    if kind.members and not (made and all(_is_of_kind(one, kind) for one in made)):
        what = ", ".join(one.__name__ for one in made) or "something without a declared type"
        raise ValueError(
            f"{named.key} is {named.path!r}, which makes {what}; it must be {kind.what} (which has"
            f" {', '.join(kind.members)})"
        )


def _is_dotted(path: str) -> bool:
    parts = path.split(".")
    return len(parts) > 1 and all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _is_under(path: str, packages: tuple[str, ...]) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def _made_by(component: Any) -> list[type]:
    """Return the classes that a component may return: itself, or by its annotation, values of mappings."""
    if isinstance(component, type):
        return [component]
    try:
        found = typing.get_type_hints(component).get("return")
    except (NameError, TypeError):
        return []
    pending, classes = [found], []
    while pending:
        hint = pending.pop()
        arguments = typing.get_args(hint)
        origin = typing.get_origin(hint)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            pending.append(arguments[1])
        elif origin in (typing.Union, types.UnionType):
            pending += arguments
        elif isinstance(hint, type):
            classes.append(hint)
        else:
            return []
    return classes


def _is_of_kind(made: type, kind: Kind) -> bool:
    return _has_members(made, kind.members) or bool(kind.or_members and _has_members(made, kind.or_members))


def _has_members(kind: type, members: tuple[str, ...]) -> bool:
    # Not hasattr: every class is itself callable, and a field without default is no attribute.
    known = {name for base in kind.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return known.issuperset(members)
