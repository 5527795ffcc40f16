"""``ppl-eval compare``: finished runs beside a base run, for people, for programs and as a gate."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ppl_eval.results.baseline import EXIT_INCOMPARABLE, EXIT_MISMATCH

_CODES = (
    f"Exit codes: 0 all limits are kept, or none was given; {EXIT_MISMATCH} one is exceeded;"
    f" {EXIT_INCOMPARABLE} runs cannot be compared, or a limit cannot be checked; 2 wrong arguments."
)


def add_compare(commands: Any) -> None:
    """Add the sub-command to the parser of ``ppl-eval``."""
    parser = commands.add_parser(
        "compare",
        help="compare finished runs with a base run; a gate for CI",
        description="Perplexity ratio with a paired interval, window by window, and KL divergence where the"
        f" results hold it. {_CODES}",
    )
    parser.add_argument("base", type=Path, help="folder of the run that the others are held against")
    parser.add_argument("others", type=Path, nargs="+", metavar="run", help="folders of the runs to compare")
    parser.add_argument(
        "--max-ppl-ratio", type=float, metavar="X", help="largest perplexity ratio that passes"
    )
    parser.add_argument(
        "--max-kl", type=float, metavar="X", help="largest mean KL divergence that passes, nats"
    )
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="windows to show (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ppl_eval.reports.compare import check_gate, compare_runs
    from ppl_eval.reports.runs import read_runs
    from ppl_eval.reports.terminal import print_comparison

    if arguments.worst < 0:
        raise ValueError(f"--worst is {arguments.worst}; it must be at least 0")
    base, *others = read_runs([arguments.base, *arguments.others])
    found = compare_runs(base, others, arguments.worst)
    over, unknown = check_gate(found, arguments.max_kl, arguments.max_ppl_ratio)
    incomparable = [entry["name"] for entry in found["comparisons"] if entry["kind"] == "incomparable"]
    code = EXIT_INCOMPARABLE if incomparable or unknown else EXIT_MISMATCH if over else 0
    if arguments.json:
        print(
            json.dumps(
                {**found, "exceeded": over, "not_checked": unknown, "exit_code": code}, ensure_ascii=False
            )
        )
    else:
        print_comparison(found, Console())
    for line in (*over, *unknown):
        print(line, file=sys.stderr)
    return code
