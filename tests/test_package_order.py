"""Packages import downwards only: the order of docs/architecture.md, held for every import statement."""

import ast
from pathlib import Path

import pytest

import ppl_eval

ROOT = Path(ppl_eval.__file__).parent
# Each imports only itself and those before it.
ORDER = (
    "config",
    "tokenization",
    "models",
    "data",
    "checkpoints",
    "protocols",
    "parallel",
    "quantization",
    "metrics",
    "scoring",
    "distributed",
    "run",
    "results",
    "reports",
    "api",
    "tasks",
    "experiments",
    "commands",
)


def imported_packages(source: str) -> set[str]:
    """Packages of ppl_eval that a module imports, in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("ppl_eval."):
                found.add(name.split(".")[1])
    return found


def against_the_order(package: str, source: str) -> set[str]:
    allowed = {*ORDER[: ORDER.index(package) + 1], "__version__"}
    return imported_packages(source) - allowed


def test_the_order_names_every_package():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"configs"} == set(ORDER)
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_to_packages_before(package):
    for path in sorted((ROOT / package).glob("*.py")):
        wrong = against_the_order(package, path.read_text())
        assert not wrong, f"{package}/{path.name} imports {sorted(wrong)}, which come after {package}"


def test_an_import_turned_round_is_found():
    hidden = "def f():\n    from ppl_eval.results import ledger\n"
    assert against_the_order("metrics", hidden) == {"results"}
    assert against_the_order("results", hidden) == set()


def test_only_models_knows_an_engines_decoders():
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name != "models":
            source = path.read_text()
            assert "TransformerDecoder" not in source, path
            assert not any(
                alias.name.split(".")[0] == "transformers"
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Import)
                for alias in node.names
            ), path
