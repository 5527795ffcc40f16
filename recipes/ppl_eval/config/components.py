"""What a section's ``_component_`` names: imported, its arguments checked by name, built."""

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ppl_eval.config import own_code
from ppl_eval.config.kinds import Named, check_name, check_object, components_in, kind_of_section

# Where a name that configs were written with has moved since.
MOVED = {"ppl_eval.calibration.awq": "ppl_eval.quantization.awq"}


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint at the nearest known name, to be put behind a message; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix + near[0]!r}?" if near else ""


def resolve_component(named: Named) -> Any:
    """Find what a dotted path names, by real modules and one attribute of the last of them.

    Raises:
        ValueError: if its section may not name it, or it does not exist; with the nearest name that does.
    """
    check_name(named)
    key, path = named.key, named.path
    place, _, name = path.rpartition(".")
    module = _import(place, named)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1, cutoff=0.5)
        hint = f"; did you mean '{place}.{near[0]}'?" if near else ""
        raise ValueError(f"{key} is {path!r}, but {place} has no {name!r}{hint}")
    found = getattr(module, name)
    check_object(named, found)
    return found


def _import(place: str, named: Named) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(f"{missing}."):
            raise _unimportable(named, place, error) from error
        parent, _, part = missing.rpartition(".")
        hint = _near_module(parent, part, named.path[len(missing) :]) if parent else ""
        raise ValueError(
            f"{named.key} is {named.path!r}, but there is no module {missing!r}{hint}"
        ) from error
    except Exception as error:  # whatever a person's own module raises
        raise _unimportable(named, place, error) from error


def _unimportable(named: Named, place: str, error: Exception) -> ValueError:
    why = f"{type(error).__name__}: {error}"
    return ValueError(f"{named.key} is {named.path!r}, but importing {place} failed: {why}")


def _near_module(parent: str, part: str, rest: str) -> str:
    near = difflib.get_close_matches(part, dir(importlib.import_module(parent)), n=1, cutoff=0.5)
    return f"; did you mean '{parent}.{near[0]}{rest}'?" if near else ""


def check_component(name: str, section: DictConfig) -> None:
    """Check a section's component by name, without importing anything but this project's own.

    Args:
        name: the section's key.
        section: the section; a component that has moved gets its new path.

    Raises:
        ValueError: if it names none, or one that may not stand there.
    """
    component = section.get("_component_")
    if component is None:
        raise ValueError(f"{name}._component_ is missing: the dotted path of what to build")
    if isinstance(component, str) and component in MOVED:
        section._component_ = component = MOVED[component]
    for named in components_in(name, kind_of_section(name), OmegaConf.to_container(section)):
        check_name(named)
    if component.startswith("ppl_eval."):
        check_arguments(name, section)


def check_arguments(section: str, node: Mapping[Any, Any]) -> Any:
    """Find a section's component, and check its argument names.

    Returns:
        The component.

    Raises:
        ValueError: for a component that may not stand there, an argument that it does not take, or one that
            it needs and is not there.
    """
    component = resolve_component(next(components_in(section, kind_of_section(section), node)))
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


def check_inside(section: str, plain: Mapping[Any, Any]) -> None:
    """Check all components that are named inside a section: whoever is given them may build them.

    Args:
        section: the config key.
        plain: the section, interpolations resolved.

    Raises:
        ValueError: for one that does not exist or may not stand there.
    """
    for named in [*components_in(section, kind_of_section(section), plain)][1:]:
        resolve_component(named)


def _missing_package(error: BaseException | None) -> str | None:
    """Return the package that was not there to import. torchtune raises errors of its own from the real
    one."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            return error.name.partition(".")[0]
        error = error.__cause__
    return None


def instantiate(section: str, node: DictConfig) -> Any:
    """Build a section's component from its arguments.

    Raises:
        ValueError: if the component does not exist or does not take these arguments, or says that a value is
            wrong.
    """
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    check_inside(section, plain)
    component = check_arguments(section, plain)
    own_code.mind_working_directory()
    arguments = {str(name): value for name, value in plain.items() if name != "_component_"}
    try:
        return component(**arguments)
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"{section}: {node['_component_']} refused its arguments {arguments}: {error}"
        ) from error
    except Exception as error:  # a damaged tokenizer.json is a plain Exception
        if component.__module__.startswith("ppl_eval."):
            raise
        package = _missing_package(error)
        if package is not None:
            raise ValueError(
                f"{section}: {node['_component_']} needs the package {package}, which is not installed: pip"
                f" install {package}"
            ) from error
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{section}: {node['_component_']} cannot be built with {arguments}: {why}"
        ) from error
