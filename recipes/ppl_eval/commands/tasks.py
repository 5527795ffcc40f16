"""``ppl-eval tasks``: multiple choice, cloze and rolling tasks of lm-eval, alone or under torchrun."""

import argparse
from typing import Any


def add_tasks(commands: Any) -> None:
    """Add the sub-command."""
    tasks = commands.add_parser(
        "tasks",
        help="evaluate lm-eval's tasks with a config's model",
        description=(
            "lm-eval's own evaluator; results in its form, in output_dir/results.json. torchtune's evaluation"
            " configs are read as they are. On several ranks: torchrun --nproc_per_node 8 -m"
            " ppl_eval.commands.cli tasks ..."
        ),
    )
    tasks.add_argument("--config", required=True, help="a path or a shipped name")
    tasks.add_argument("--tasks", help="names, with commas between")
    tasks.add_argument("--limit", type=float, help="documents of each task (below 1: a share)")
    tasks.add_argument("--num_fewshot", type=int, help="examples before each question")
    tasks.add_argument("--include_path", help="a folder with tasks of your own")
    tasks.add_argument("overrides", nargs="*", help="key=value or ~key, as in a run")
    tasks.set_defaults(command=_tasks)


def _tasks(arguments: argparse.Namespace) -> int:
    from ppl_eval.distributed.outcome import Stop
    from ppl_eval.tasks.evaluation import run_tasks

    names = ("tasks", "limit", "num_fewshot", "include_path")
    asked = {name: getattr(arguments, name) for name in names}
    if asked["limit"] is not None and asked["limit"] >= 1:
        asked["limit"] = int(asked["limit"])
    try:
        return run_tasks(arguments.config, arguments.overrides, asked)
    except Stop as stop:
        return stop.code
