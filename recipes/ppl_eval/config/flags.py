"""What only the command line may say: a file that somebody else wrote must not."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

_OWN_CODE, _PICKLE = "allow_components", "checkpointer.allow_unsafe_pickle"
_WHY = {
    _OWN_CODE: "lets a config run code of the packages that it lists",
    _PICKLE: "lets a checkpoint run code",
}


@dataclass(frozen=True)
class Flags:
    """What only the command line may say.

    Attributes:
        allow_components: packages of the person's own whose components the config may name.
        allow_unsafe_pickle: unpickle a checkpoint without restrictions where the safe way fails.
    """

    allow_components: tuple[str, ...] = ()
    allow_unsafe_pickle: bool = False

    def written(self) -> dict[str, Any]:
        """Return the flags that were given, as keys: all ranks must be started with the same ones."""
        given: dict[str, Any] = {}
        if self.allow_components:
            given[_OWN_CODE] = list(self.allow_components)
        if self.allow_unsafe_pickle:
            given[_PICKLE] = True
        return given


NO_FLAGS = Flags()


def take_flags(arguments: Iterable[str]) -> tuple[Flags, list[str]]:
    """Split the flags from the overrides.

    Raises:
        ValueError: for a value of ``checkpointer.allow_unsafe_pickle`` other than true or false.
    """
    packages: tuple[str, ...] = ()
    unpickle, rest = False, []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key == _OWN_CODE:
            names = (name.strip().strip("'\"") for name in value.strip().strip("[]").split(","))
            packages = tuple(name for name in names if name)
        elif equals and key == _PICKLE:
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{_PICKLE} is {value!r}; it must be true or false")
            unpickle = value.lower() == "true"
        else:
            rest.append(argument)
    return Flags(packages, unpickle), rest


def refuse_flags_in(config: DictConfig) -> None:
    """Refuse a config, interpolations resolved, that says what only the command line may say.

    Raises:
        ValueError: names the key and what to write instead.
    """
    for key, why in _WHY.items():
        value = OmegaConf.select(config, key)
        if value not in (None, False):
            shown = ",".join(map(str, value)) if OmegaConf.is_list(value) else str(value).lower()
            raise ValueError(
                f"{key} is in the config file, but it counts only on the command line, because it {why}:"
                f" remove it there and, if you trust them, start the run with {key}={shown}"
            )
