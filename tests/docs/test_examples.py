"""The launch examples: they parse, they name shipped configs, and they start what the README starts."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from ppl_eval.config.settings import read_settings
from ppl_eval.config.yaml_files import shipped_configs

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").iterdir())
LINE = re.compile(r"(?:tune run|ppl-eval launch)\b.*?(--config \S+(?: \w[\w.]*=\S+)*)")
MULTINODE = Path(__file__).parents[2] / "docs" / "multinode.md"


def lines(text):
    """Launch lines, continuations joined."""
    return LINE.findall(text.replace("\\\n", " "))


@pytest.mark.parametrize(
    "path", [path for path in [*EXAMPLES, MULTINODE] if path.suffix != ".ipynb"], ids=lambda path: path.name
)
def test_launch_lines_use_a_shipped_config(path):
    found = lines(path.read_text())
    assert found
    for arguments in found:
        name = arguments.split()[1]
        assert name in shipped_configs()
        read_settings(arguments.replace('"', "").replace("$", "").split())


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.suffix == ".sh"], ids=lambda path: path.name
)
def test_shell_scripts_parse(path):
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    assert path.stat().st_mode & 0o100, "it can be run"


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.suffix == ".yaml"], ids=lambda path: path.name
)
def test_manifests_parse_and_give_a_rendezvous(path):
    manifest = yaml.safe_load(path.read_text())
    assert manifest["kind"] in ("PyTorchJob", "TrainJob")
    for name in ("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"):
        assert name in path.read_text()
    if manifest["kind"] == "PyTorchJob":
        roles = manifest["spec"]["pytorchReplicaSpecs"]
        nodes = sum(role["replicas"] for role in roles.values())
        (container,) = roles["Worker"]["template"]["spec"]["containers"]
        script = container["args"][0]
    else:
        nodes, script = manifest["spec"]["trainer"]["numNodes"], manifest["spec"]["trainer"]["args"][0]
    assert f"--nnodes {nodes} " in script
    assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0


def test_slurm_script_starts_the_readmes_line(tmp_path):
    """Run with stand-ins for scontrol and srun: what would be started, and with which rendezvous."""
    for name, body in {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'echo "$@"; env | grep ^PET_',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (script,) = (path for path in EXAMPLES if path.name == "slurm.sh")
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
    }  # fmt: skip
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "tune run --nnodes 2 --nproc_per_node 8 distributed_ppl_eval --config llama3_1/8B_ppl" in done.stdout
    )
    assert "PET_RDZV_ENDPOINT=node7:23456" in done.stdout
    assert "PET_RDZV_ID=123456" in done.stdout
