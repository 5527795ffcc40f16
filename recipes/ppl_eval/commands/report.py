"""``ppl-eval report``: a page, a snippet or a results file from finished runs."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_report(commands: Any) -> None:
    """Add the sub-command to the parser of ``ppl-eval``."""
    parser = commands.add_parser(
        "report",
        help="write a report of finished runs",
        description="html: one self-contained page; of several runs the first is the base. markdown: a table"
        " for a model card. lm-eval: results as lm-eval writes them.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="folders of finished runs")
    parser.add_argument("-o", "--output", type=Path, help="the file (default: report.html; else the screen)")
    parser.add_argument("--format", choices=("html", "markdown", "lm-eval"), default="html")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> None:
    from ppl_eval.reports import html, snippets
    from ppl_eval.reports.runs import read_runs

    runs = read_runs(arguments.runs)
    if arguments.format == "html":
        path = arguments.output or Path("report.html")
        html.write_report(runs, path)
        print(f"written to {path}")
        return
    text = snippets.markdown(runs) if arguments.format == "markdown" else snippets.lm_eval(runs)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
        print(f"written to {arguments.output}")
