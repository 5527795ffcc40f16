"""The section ``reference``: the model that a run's model is compared with, in sections of its own.

    reference:
      model: ...          # as the config's own sections of these names
      checkpointer: ...
      quantizer: ...      # may be left out

All else (text, tokenizer, protocol, device, dtype) is the run's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ppl_eval.config.components import suggest

if TYPE_CHECKING:
    from ppl_eval.config.settings import Settings

PREFIX = "reference."
_NEEDED, _KEYS = ("model", "checkpointer"), ("model", "checkpointer", "quantizer")


def sections_of(reference: Mapping[str, Any] | None) -> Iterator[tuple[str, DictConfig]]:
    """Walk the sections inside a config's ``reference``, by their whole keys.

    Raises:
        ValueError: for one that is missing, unknown, or no section.
    """
    if reference is None:
        return
    for name in reference:
        if name not in _KEYS:
            raise ValueError(
                f"unknown key '{PREFIX}{name}'{suggest(str(name), _KEYS, PREFIX)}; reference has the sections"
                f" {', '.join(_KEYS)}, and the rest of the config holds for both models"
            )
    for name in _KEYS:
        section = reference.get(name)
        if section is None and name not in _NEEDED:
            continue
        if not isinstance(section, DictConfig):
            raise ValueError(
                f"{PREFIX}{name} is {section!r}; it must be a section with a _component_, as the config's own"
                f" {name} is (${{{name}}} takes that one)"
            )
        yield f"{PREFIX}{name}", section


def settings_of_reference(settings: "Settings") -> "Settings | None":
    """Return the settings by which the reference is built and loaded; None for a run without one."""
    section = settings.reference
    if section is None:
        return None
    return replace(
        settings,
        model=section["model"],
        checkpointer=section["checkpointer"],
        quantizer=section.get("quantizer"),
        reference=None,
    )
