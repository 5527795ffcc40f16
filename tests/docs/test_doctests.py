"""The examples in docstrings are run."""

import doctest
import importlib
from pathlib import Path

import pytest

import ppl_eval

ROOT = Path(ppl_eval.__file__).parent
MODULES = [
    ".".join(("ppl_eval", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.glob("*/*.py"))
    if ">>>" in path.read_text()
]


def test_there_are_examples_in_several_packages():
    assert len({name.split(".")[1] for name in MODULES}) >= 4


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
