"""`ppl-eval doctor`: what is wrong with this machine, this network, or these two numbers.

Every check gives ``Finding``s, which are shown as a table or as JSON. Exit codes: 0 if all is well, 1 if
something needs attention, 2 for a wrong call.
"""

import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ppl_eval.config.paths import home

EXIT_ATTENTION = 1
_GIB = 2**30
# Every neighbour is a socket, every mapped tensor a file.
_OPEN_FILES = 4096
# File systems of other machines: locks and times may be less than exact there.
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "9p")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        needed: what is needed; empty where anything will do.
        found: what was found.
        remedy: what to do; empty if nothing is wrong.
    """

    what: str
    needed: str
    found: str
    remedy: str = ""


def environment() -> list[Finding]:
    """Look at packages, devices, memory, limits and file systems of this machine."""
    return [*_packages(), *_devices(), *_limits(), *_folders()]


def facts() -> dict[str, str]:
    """Return the findings of ``environment`` as facts that ranks can compare."""
    return {finding.what: finding.found for finding in environment()}


def differences(facts_of_ranks: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Return what differs between ranks, by the name of a rank; what is free right now does not count."""
    findings = []
    names = dict.fromkeys(name for facts in facts_of_ranks.values() for name in facts)
    for name in names:
        if name.endswith("now"):
            continue
        values: dict[str, list[str]] = {}
        for rank, found in facts_of_ranks.items():
            values.setdefault(found.get(name, "absent"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in values.items())
            findings.append(Finding(name, "the same on all ranks", shown, "make them equal"))
    return findings


def show(
    findings: Iterable[Finding],
    title: str,
    *,
    as_json: bool,
    columns: tuple[str, str] = ("needed", "found"),
) -> int:
    """Print findings; return the exit code.

    Args:
        findings: what to print.
        title: of the table.
        as_json: print JSON instead.
        columns: headings of what is needed and what was found.
    """
    findings = list(findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table(title=title, title_justify="left")
        for column in ("", "what", *columns, "what to do"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            mark = "[red]!" if finding.remedy else "[green]ok"
            table.add_row(mark, finding.what, finding.needed, finding.found, finding.remedy)
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    return EXIT_ATTENTION if any(finding.remedy for finding in findings) else 0


def _packages() -> list[Finding]:
    findings = [Finding("python", ">=3.11", platform.python_version())]
    for line in requires("distributed_ppl_eval") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = str(requirement.specifier)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "absent"
        # A local version such as 2.13.0+cpu is that release.
        wrong = found == "absent" or not requirement.specifier.contains(found.split("+")[0], prereleases=True)
        remedy = f"pip install '{requirement.name}{needed}'" if wrong else ""
        findings.append(Finding(requirement.name, needed, found, remedy))
    return findings


def _devices() -> list[Finding]:
    import torch
    import torch.distributed as dist

    findings = [
        Finding("cpu", "", f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"),
        Finding(
            "threads", "", f"{torch.get_num_threads()} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')})"
        ),
        Finding("MKL_CBWR", "AUTO,STRICT", str(os.environ.get("MKL_CBWR")), _mkl_remedy()),
        Finding("gloo", "for CPUs", "available" if dist.is_gloo_available() else "absent"),
        Finding("nccl", "for GPUs", "available" if dist.is_nccl_available() else "absent"),
    ]
    built = torch.version.cuda
    if built is None:
        return [*findings, Finding("cuda", "", "this torch is built for CPUs", _driver_remedy())]
    if not torch.cuda.is_available():
        # The plain wheel of many releases is a CUDA build: without a driver it is one for CPUs.
        remedy = f"no GPU can be used by this torch, built for CUDA {built}: is the driver new enough?"
        remedy = remedy if _has_driver() else ""
        return [*findings, Finding("cuda", built, "no device", remedy)]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, {about.total_memory / _GIB:.0f} GiB, compute {about.major}.{about.minor}"
        findings.append(Finding(f"cuda:{index}", built, found))
    return findings


def _mkl_remedy() -> str:
    set_to = os.environ.get("MKL_CBWR", "")
    if set_to.endswith("STRICT"):
        return ""
    return "bits may depend on the number of threads: leave it unset, or set it to AUTO,STRICT"


def _driver_remedy() -> str:
    if not _has_driver():
        return ""
    return "there is an NVIDIA driver: install a CUDA build of torch to use the GPU"


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").is_file()


def _limits() -> list[Finding]:
    memory = dict(_memory())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= most < _OPEN_FILES
    return [
        Finding("memory", "the model once per node", f"{memory.get('MemTotal', 0) / _GIB:.1f} GiB"),
        Finding("memory free now", "", f"{memory.get('MemAvailable', 0) / _GIB:.1f} GiB"),
        Finding(
            "open files",
            f"{_OPEN_FILES} for hundreds of ranks",
            "unlimited" if most < 0 else str(most),
            "raise the hard limit (ulimit -Hn, limits.conf)" if few else "",
        ),
    ]


def _memory() -> Iterable[tuple[str, int]]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        yield name, int(value.split()[0]) * 1024


def _folders() -> list[Finding]:
    findings = []
    for name, path in (("cache", home()), ("working directory", Path.cwd())):
        there = next(folder for folder in (path, *path.parents) if folder.is_dir())
        kind, free = _file_system(there), shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        remedy = "" if writable else "choose a folder that can be written (PPL_EVAL_HOME, output_dir)"
        shown = f"{path} ({kind}{', over the network' if kind in _REMOTE else ''})"
        findings.append(Finding(name, "writable", shown, remedy))
        findings.append(Finding(f"{name}: free now", "", f"{free / _GIB:.1f} GiB"))
    return findings


def _file_system(path: Path) -> str:
    """Return the type of the file system of a folder, from /proc/mounts."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = path.resolve()
    fitting = [(mount[1], mount[2]) for mount in mounts if resolved.is_relative_to(mount[1])]
    return max(fitting, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def compare_ranks(as_json: bool) -> int:
    """Compare the environment of all ranks, under torchrun; rank 0 prints what differs."""
    from ppl_eval.distributed.process import connect, wait_for

    process = connect(60)
    process.store.set(f"doctor/{process.rank}", json.dumps(facts()))
    if process.rank != 0:
        wait_for(process, "doctor/read", "rank 0 to read what it found")
        return 0
    found: dict[str, Any] = {}
    for rank in range(process.world_size):
        wait_for(process, f"doctor/{rank}", f"rank {rank}")
        found[f"rank {rank}"] = json.loads(process.store.get(f"doctor/{rank}"))
    process.store.set("doctor/read", "")
    title = f"{process.world_size} ranks: what differs"
    return show(differences(found), title, as_json=as_json)
