"""``ppl-eval sweep``: many configs, one table."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_eval.config.files import whole_file


def add_sweep(commands: Any) -> None:
    """Add the sub-command."""
    sweep = commands.add_parser(
        "sweep",
        help="run many configs and compare them",
        description=(
            "Runs the configs of SWEEP.yaml that have no result yet, and writes summary.parquet, .csv and"
            " .html. A sweep that was stopped goes on where it was."
        ),
    )
    sweep.add_argument("path", type=Path, metavar="SWEEP.yaml", help="see docs/sweeps.md")
    sweep.add_argument("--slots", type=int, help="runs at once (default: one, or as many as GPUs allow)")
    sweep.add_argument("--nproc_per_node", type=int, default=1, help="processes of each run (default 1)")
    sweep.add_argument("--only", type=int, metavar="N", help="run number N alone, from 0")
    sweep.add_argument("--summary", action="store_true", help="write the summary; runs nothing")
    sweep.add_argument("--plot", metavar="COLUMN", help="draw perplexity against a column; runs nothing")
    sweep.add_argument("--emit", choices=["slurm"], help="write a job array for a cluster; runs nothing")
    sweep.set_defaults(command=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from ppl_eval.experiments import slots
    from ppl_eval.experiments.sweep_file import read_sweep

    if arguments.nproc_per_node < 1 or (arguments.slots is not None and arguments.slots < 1):
        raise ValueError("--slots and --nproc_per_node must be at least 1")
    sweep = read_sweep(arguments.path)
    if arguments.emit:
        print(_emit_slurm(sweep, arguments))
        return 0
    jobs = [slots.Job(run.name, run.config, run.folder) for run in sweep.runs]
    if arguments.plot:
        return _plot(sweep, jobs, arguments.plot)
    if arguments.only is not None:
        if not 0 <= arguments.only < len(jobs):
            raise ValueError(f"--only is {arguments.only}; the sweep has runs 0 to {len(jobs) - 1}")
        job = jobs[arguments.only]
        with slots.only_one(job.folder.parent / f".{job.name}"):
            return _run([job], 1, arguments.nproc_per_node)
    with slots.only_one(sweep.output_dir):
        if arguments.summary:
            slots.look(jobs)
            code = 0
        else:
            code = _run(jobs, arguments.slots or _default_slots(arguments), arguments.nproc_per_node)
        print(_write_summary(sweep, jobs))
        return code


def _default_slots(arguments: argparse.Namespace) -> int:
    from ppl_eval.experiments.slots import visible_devices

    return max(1, len(visible_devices()) // arguments.nproc_per_node)


def _run(jobs: Sequence[Any], num_slots: int, nproc_per_node: int) -> int:
    from ppl_eval.experiments import live_table, slots

    for job in jobs:
        slots.prepare(job)
    done = sum(job.state == slots.DONE for job in jobs)
    print(f"{len(jobs)} runs, {done} of them done before; {num_slots} at once", flush=True)
    with live_table.shown(jobs) as show:
        slots.run_jobs(jobs, num_slots, nproc_per_node, show)
    failed = [job for job in jobs if job.state == slots.FAILED]
    for job in failed:
        print(f"{job.name} failed, {job.message} (log: {job.folder / slots.LOG})", file=sys.stderr)
    return 1 if failed else 0


def _rows(sweep: Any, jobs: Sequence[Any]) -> list[dict[str, Any]]:
    from ppl_eval.experiments import slots, summary

    results = {job.name: job.result() for job in jobs if job.state == slots.DONE}
    other = results.get(sweep.compare_to)
    folders = {job.name: job.folder for job in jobs}
    rows = []
    for run, job in zip(sweep.runs, jobs, strict=True):
        row = {"run": run.name, "state": job.state, **{axis: run.levels.get(axis) for axis in sweep.axes}}
        row |= run.tags
        if job.name in results:
            row |= summary.figures_of(results[job.name])
            row |= summary.differences_of(results[job.name], job.folder, other, folders.get(sweep.compare_to))
        rows.append(row)
    return rows


def _write_summary(sweep: Any, jobs: Sequence[Any]) -> str:
    from ppl_eval.experiments import summary

    rows = _rows(sweep, jobs)
    summary.write_table(rows, sweep.output_dir / "summary")
    page = sweep.output_dir / "summary.html"
    summary.write_page(rows, page, f"Sweep {sweep.path.stem}", sweep.axes, sweep.compare_to)
    lines = []
    if sweep.compare_to and not any(row.get("perplexity_ratio") for row in rows):
        lines.append(f"no differences: {sweep.compare_to}, which they would be to, has no result")
    return "\n".join([*lines, f"written to {page.with_suffix('')}.parquet, .csv and .html"])


def _plot(sweep: Any, jobs: Sequence[Any], column: str) -> int:
    from ppl_eval.experiments import slots, summary

    slots.look(jobs)
    path = sweep.output_dir / f"plot-{column.replace(os.sep, '_')}.png"
    rows = _rows(sweep, jobs)
    # An axis that decides the column is along the figure; the others are lines.
    apart = [axis for axis in sweep.axes if axis != column and not _decides(rows, axis, column)]
    summary.plot(rows, column, path, apart)
    print(f"written to {path}")
    return 0


def _decides(rows: Sequence[dict[str, Any]], axis: str, column: str) -> bool:
    pairs = {(row.get(axis), row.get(column)) for row in rows if row.get(column) is not None}
    return len(pairs) == len({level for level, _ in pairs})


def _emit_slurm(sweep: Any, arguments: argparse.Namespace) -> str:
    path = sweep.output_dir / "sweep.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = f"%{arguments.slots}" if arguments.slots else ""
    command = shlex.join(["ppl-eval", "sweep", str(arguments.path)])
    nproc = arguments.nproc_per_node
    with whole_file(path) as file:
        file.write(
            "#!/bin/bash\n"
            f"#SBATCH --job-name={shlex.quote(f'sweep-{sweep.path.stem}')}\n"
            f"#SBATCH --array=0-{len(sweep.runs) - 1}{limit}\n"
            "#SBATCH --nodes=1\n"
            "#SBATCH --requeue\n"
            f"# Add what this cluster asks for: partition, time, memory, --gpus-per-node={nproc}.\n"
            # Slurm runs a copy of the script, in the folder of submission.
            f'exec {command} --only "$SLURM_ARRAY_TASK_ID" --nproc_per_node {nproc}\n'
        )
    return f"written to {path}: sbatch {path}, and when all are done: {command} --summary"
