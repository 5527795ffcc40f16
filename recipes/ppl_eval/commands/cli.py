"""The `ppl-eval` command: everything around a run that `tune run` does not do."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from ppl_eval import __version__
from ppl_eval.commands.compare import add_compare
from ppl_eval.commands.doctor_cli import add_doctor
from ppl_eval.commands.launch import ENDPOINT, prepare, start
from ppl_eval.commands.report import add_report
from ppl_eval.commands.run import add_run
from ppl_eval.commands.sweep import add_sweep
from ppl_eval.commands.tasks import add_tasks
from ppl_eval.config.files import keep_to_owner
from ppl_eval.config.yaml_files import find_config, shipped_configs


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with 2 and one clear line when something is wrong."""
    arguments = _parser().parse_args(argv)
    keep_to_owner()
    try:
        code = arguments.command(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if code:
        sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppl-eval", description="Helpers around `tune run distributed_ppl_eval`."
    )
    parser.add_argument("--version", action="version", version=f"ppl-eval {__version__}")
    shtab.add_argument_to(parser, "--print-completion", help="print a completion script for this shell")
    commands = parser.add_subparsers(required=True, metavar="command")
    add_run(commands)
    add_tasks(commands)
    add_compare(commands)
    add_report(commands)
    add_sweep(commands)

    ls = commands.add_parser("ls", help="list the shipped configs")
    ls.set_defaults(command=_ls)

    cp = commands.add_parser("cp", help="copy a shipped config, to edit it")
    cp.add_argument("name", help="as `ppl-eval ls` shows it, for example smollm2/135M_ppl")
    cp.add_argument("path", type=Path, help="the new file, or a folder")
    cp.set_defaults(command=_cp)

    _add_launch(commands)

    fetch = commands.add_parser("fetch", help="get the demo model")
    fetch.add_argument("name", help="smollm2-135m")
    fetch.set_defaults(command=_fetch)

    add_doctor(commands)

    merge = commands.add_parser(
        "merge",
        help="join the parts of a run (part: 1/16 ... 16/16)",
        description="Joins parts to the result that one run would have given. The data must be reachable.",
    )
    merge.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a part's folder, or one above")
    merge.add_argument("-o", "--output_dir", required=True, type=Path, help="where result.json goes")
    merge.set_defaults(command=_merge)

    quantize = commands.add_parser(
        "quantize", help="quantise a config's checkpoint, on any device, and write it"
    )
    quantize.add_argument(
        "--config", required=True, help="a path or a shipped name; it must have a quantizer"
    )
    quantize.add_argument(
        "overrides", nargs="*", help="key=value, as in a run; output_dir gets the new checkpoint"
    )
    quantize.set_defaults(command=_quantize)
    return parser


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser(
        "launch",
        help="start a run on one or more nodes",
        usage="ppl-eval launch --nnodes 2 --nproc_per_node 8 --rdzv_endpoint HOST:PORT -- --config NAME ...",
        description="The same command on every node. Options are torchrun's; after -- come the recipe's.",
    )
    launch.add_argument("--nnodes", default="1", help="nodes of the run, or MIN:MAX (default 1)")
    launch.add_argument("--nproc_per_node", default="1", help="processes on this node: a number or gpu")
    launch.add_argument(
        "--rdzv_endpoint", default=os.environ.get(ENDPOINT), help="HOST:PORT of one of the nodes"
    )
    launch.add_argument("--rdzv_id", default="ppl_eval", help="name of the run (default ppl_eval)")
    launch.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        help="how often ranks that failed are started again (default 0)",
    )
    launch.add_argument("recipe_arguments", nargs="*", help=argparse.SUPPRESS)
    launch.set_defaults(command=_launch)


def _ls(_: argparse.Namespace) -> None:
    for name in shipped_configs():
        print(name)


def _cp(arguments: argparse.Namespace) -> None:
    source, target = find_config(arguments.name), arguments.path
    if target.is_dir():
        target = target / source.name
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise ValueError(f"{target} is already there; choose another name, or remove it first") from error
    except FileNotFoundError as error:
        raise ValueError(f"the folder {target.parent} does not exist") from error
    print(
        f"{arguments.name} copied to {target}; run it with: tune run distributed_ppl_eval --config {target}"
    )


def _launch(arguments: argparse.Namespace) -> None:
    launch = prepare(
        arguments.nnodes,
        arguments.nproc_per_node,
        arguments.rdzv_endpoint,
        arguments.rdzv_id,
        arguments.recipe_arguments,
        max_restarts=arguments.max_restarts,
    )
    sys.exit(start(launch))


def _fetch(arguments: argparse.Namespace) -> None:
    from ppl_eval.commands.demo_model import fetch

    print(f"{arguments.name} is in {fetch(arguments.name)}")


def _merge(arguments: argparse.Namespace) -> None:
    from ppl_eval.commands.merge import merge

    merge(arguments.folders, arguments.output_dir)


def _quantize(arguments: argparse.Namespace) -> None:
    from ppl_eval.commands.quantize import quantize_checkpoint
    from ppl_eval.config.settings import read_settings

    path, done, notes = quantize_checkpoint(
        read_settings(["--config", arguments.config, *arguments.overrides])
    )
    for layer, scheme in done.quantized:
        print(f"{layer}: {scheme}")
    for layer, reason in done.skipped:
        print(f"{layer}: left as it was, {reason}")
    for note in notes:
        print(f"note: {note}")
    print(
        f"written to {path} (report: {path.with_suffix('.json').name}); score it with: tune run "
        f"distributed_ppl_eval"
        f" --config {arguments.config} ~quantizer"
        " checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer"
        f" checkpointer.checkpoint_dir={path.parent} 'checkpointer.checkpoint_files=[{path.name}]'"
    )


if __name__ == "__main__":
    main()
