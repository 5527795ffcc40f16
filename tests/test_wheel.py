"""The built wheel, installed into an empty environment and used from an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that holds the wheel, and sees the outer one's dependencies."""
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    source.mkdir()
    # A copy, because setuptools writes into the tree that it builds.
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "configs", source / "configs", ignore=ignored)
    shutil.copytree(ROOT / "recipes", source / "recipes", ignore=ignored, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    check(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp, source)
    (wheel,) = tmp.glob("*.whl")
    check(sys.executable, "-m", "venv", "--without-pip", tmp / "venv")
    check(*pip, "--python", tmp / "venv", "install", "--no-deps", wheel)
    (site_packages,) = (tmp / "venv").glob("lib/python*/site-packages")
    # The .pth files of these folders are not read, so an editable install of the checkout stays out.
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "outer.pth").write_text("\n".join(outer))
    return tmp / "venv" / "bin"


def check(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that must succeed; return its standard output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configs_are_listed_and_copied(installed, tmp_path):
    names = check(installed / "ppl-eval", "ls", cwd=tmp_path).split()
    folder = ROOT / "configs"
    assert names == sorted(
        path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
    )
    check(installed / "ppl-eval", "cp", "smollm2/135M_ppl", "mine.yaml", cwd=tmp_path)
    assert (tmp_path / "mine.yaml").read_text() == (folder / "smollm2" / "135M_ppl.yaml").read_text()


def test_modules_come_from_the_wheel_with_their_types(installed, tmp_path):
    program = (
        "import importlib.resources, distributed_ppl_eval, ppl_eval.configs, ppl_eval.protocols;"
        "print(distributed_ppl_eval.__file__, ppl_eval.__file__);"
        "print(importlib.resources.files('ppl_eval').joinpath('py.typed').is_file())"
    )
    files, typed = check(installed / "python", "-c", program, cwd=tmp_path).splitlines()
    assert all(Path(file).is_relative_to(installed.parent) for file in files.split())
    assert typed == "True"


def test_every_package_is_in_the_wheel(installed):
    (wheel,) = installed.parents[1].glob("*.whl")
    shipped = set(check(sys.executable, "-m", "zipfile", "-l", wheel).split())
    for path in (ROOT / "recipes").rglob("*.py"):
        name = path.relative_to(ROOT / "recipes").as_posix()
        assert name in shipped or name.startswith("ppl_eval/configs/"), name
