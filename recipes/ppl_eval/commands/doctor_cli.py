"""The arguments of `ppl-eval doctor`."""

import argparse
import re
from pathlib import Path
from typing import Any

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_doctor(commands: Any) -> None:
    """Add the sub-commands; what they need is imported when they run."""
    doctor = commands.add_parser(
        "doctor", help="find out what is wrong with a machine, a network, a run or two numbers"
    )
    kinds = doctor.add_subparsers(required=True, metavar="what")

    env = _kind(kinds, "env", "packages, devices, limits and file systems", _env)
    env.add_argument(
        "--distributed", action="store_true", help="under torchrun: only what differs between ranks"
    )

    network = _kind(kinds, "network", "names, ports and latencies; under torchrun, or with --nodes", _network)
    network.add_argument("--nodes", help="comma-separated names to resolve and reach from here")
    network.add_argument("--port", type=int, default=29500, help="port of the rendezvous (default 29500)")

    bench = _kind(kinds, "bench", "bandwidth and latency of collectives, under torchrun", _bench)
    bench.add_argument("--size", default="256M", help="largest message, such as 256M (default)")

    log = _kind(kinds, "nccl-log", "what a log of NCCL_DEBUG=INFO says", _nccl_log)
    log.add_argument("file", type=Path)

    state = _kind(kinds, "state", "what a running or dead evaluation is doing", _state)
    state.add_argument("folder", type=Path, help="its output folder")

    diff = _kind(kinds, "diff", "why two results differ", _diff)
    diff.add_argument("first", type=Path, help="output folder or result.json")
    diff.add_argument("second", type=Path, help="the other")


def _kind(kinds: Any, name: str, help_text: str, command: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help_text)
    parser.add_argument("--json", action="store_true", help="for programs, instead of a table")
    parser.set_defaults(command=command)
    return parser


def _env(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor

    if arguments.distributed:
        return doctor.compare_ranks(arguments.json)
    return doctor.show(doctor.environment(), "this machine", as_json=arguments.json)


def _network(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor, doctor_network

    if arguments.nodes:
        nodes = [node.strip() for node in arguments.nodes.split(",") if node.strip()]
        found = doctor_network.reach(nodes, arguments.port)
        return doctor.show(found, "nodes, from here", as_json=arguments.json)
    with doctor_network.ranks_of_torchrun() as (world, device):
        found = doctor_network.network(world, device)
    return doctor.show(found, "the network", as_json=arguments.json) if world.rank == 0 else 0


def _bench(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor, doctor_network

    largest = _bytes(arguments.size)
    with doctor_network.ranks_of_torchrun() as (world, device):
        found = doctor_network.bench(world, device, largest)
    title = f"{world.world_size} ranks"
    return doctor.show(found, title, as_json=arguments.json) if world.rank == 0 else 0


def _nccl_log(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor, nccl_log

    return doctor.show(nccl_log.read_log(arguments.file), str(arguments.file), as_json=arguments.json)


def _state(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor, doctor_state

    return doctor.show(doctor_state.state(arguments.folder), str(arguments.folder), as_json=arguments.json)


def _diff(arguments: argparse.Namespace) -> int:
    from ppl_eval.commands import doctor, doctor_diff
    from ppl_eval.results.baseline import read_result

    paths = [path / "result.json" if path.is_dir() else path for path in (arguments.first, arguments.second)]
    first, second = (read_result(str(path)) for path in paths)
    found = doctor_diff.explain(first, second)
    found += doctor_diff.windows_that_differ(paths[0].parent, paths[1].parent)
    return doctor.show(found, "what differs", as_json=arguments.json, columns=("first", "second"))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise ValueError(f"--size is {text!r}; it must be a number with K, M or G behind it, such as 256M")
    return int(found[1]) * _UNITS.get(found[2], 1)
