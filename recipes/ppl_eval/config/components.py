"""What a section's ``_component_`` names: imported, its arguments checked by name, built."""

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Where a name that configs were written with has moved since.
MOVED = {"ppl_eval.calibration.awq": "ppl_eval.quantization.awq"}


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint at the nearest known name, to be put behind a message; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""


def resolve_component(path: str, key: str) -> Any:
    """Import what a dotted path names.

    Args:
        path: for example ``torchtune.models.llama3_2.llama3_2_1b``.
        key: the config key it came from, for messages.

    Raises:
        ValueError: names the first part that does not exist, and the nearest that does.
    """
    parts = path.split(".")
    try:
        found: Any = importlib.import_module(parts[0])
    except ImportError as error:
        raise ValueError(f"{key} is {path!r}, but there is no module {parts[0]!r} ({error})") from error
    for i, part in enumerate(parts[1:], start=1):
        parent = ".".join(parts[:i])
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{parent}.{part}")
            except ModuleNotFoundError as error:
                if error.name != f"{parent}.{part}" and error.name != parent:
                    raise ValueError(
                        f"{key} is {path!r}, but importing {parent}.{part} failed: {error}"
                    ) from error
                near = difflib.get_close_matches(part, dir(found), n=1, cutoff=0.5)
                hint = f"; did you mean '{'.'.join([parent, near[0], *parts[i + 1 :]])}'?" if near else ""
                raise ValueError(f"{key} is {path!r}, but {parent} has no {part!r}{hint}") from error
        found = getattr(found, part)
    return found


def check_arguments(section: str, node: Mapping[str, Any]) -> Any:
    """Import a section's component and check its argument names.

    Returns:
        The component.

    Raises:
        ValueError: for an argument that it does not take, or one that it needs and is not there.
    """
    component = resolve_component(node["_component_"], f"{section}._component_")
    if not callable(component):
        raise ValueError(f"{section}._component_ is {node['_component_']!r}, which is not callable")
    try:
        parameters = inspect.signature(component).parameters
    except (TypeError, ValueError):
        return component
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in node:
        if name != "_component_" and name not in parameters and not takes_any:
            raise ValueError(
                f"unknown key '{section}.{name}': {node['_component_']} takes"
                f" {', '.join(parameters) or 'nothing'}" + suggest(str(name), parameters, f"{section}.")
            )
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if needed and name not in node:
            raise ValueError(f"the config has no {section}.{name}, which {node['_component_']} needs")
    return component


def instantiate(section: str, node: DictConfig) -> Any:
    """Build a section's component from its arguments.

    Raises:
        ValueError: if the component does not exist or does not take these arguments, or says that a value is
            wrong.
    """
    component = check_arguments(section, node)
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    arguments = {str(name): value for name, value in plain.items() if name != "_component_"}
    try:
        return component(**arguments)
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"{section}: {node['_component_']} refused its arguments {arguments}: {error}"
        ) from error
