"""What a run asks of its Python process."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def quieten_libraries() -> None:
    """Silence what libraries print about their own insides; a person can act on none of it."""
    for message in (
        "'set_vital' is deprecated",
        "Mismatch dtype between input and weight: input dtype = float",
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def long_lived_objects() -> Iterator[None]:
    """Keep what is made inside out of garbage collection.

    Imports and models make a million objects that live to the end. Looking through them for garbage, again
    and again and once more at exit, takes a second and a half and finds none.
    """
    gc.unfreeze()  # What an earlier run in this process left is garbage by now.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
