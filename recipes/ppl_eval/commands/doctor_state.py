"""What a running or dead evaluation is doing, from the files in its output folder alone.

Nothing is written, locked or asked: a run that goes on does not notice.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_eval.commands.doctor import Finding
from ppl_eval.config.activity import describe
from ppl_eval.config.environment import versions
from ppl_eval.config.files import read_json_object
from ppl_eval.distributed import neighbours
from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.metrics.window_records import record_dtype
from ppl_eval.protocols.base import BoolArray
from ppl_eval.results.ledger import FOLDER, PLAN_FILE, plan_key, rank_files
from ppl_eval.results.resume import describe_differences
from ppl_eval.results.status import EVERY_SECONDS, HostStatus, read_statuses

# A file system over the network may show what was written some seconds later.
_OLD_SECONDS = 5 * EVERY_SECONDS
_SLOW, _ENOUGH_WINDOWS = 0.5, 8
_RESULTS = ("result.json", "part.json")
_AGAIN = "start the same command again: it goes on from the records"


class _Ledger(NamedTuple):
    """What stands in the folder of a plan.

    Attributes:
        key: name of the folder.
        recorded_W: whether each window of the plan has a whole record; empty where the plan is not known.
        num_records: whole records.
        facts: what the records belong to.
        findings: what is wrong with it, and how much there is.
    """

    key: str
    recorded_W: BoolArray
    num_records: int
    facts: Mapping[str, Any]
    findings: list[Finding]


def state(output_dir: Path) -> list[Finding]:
    """Look at the folder of a run, or at one that holds the parts or context lengths of one.

    Raises:
        ValueError: if the folder is not there, or no run of this project wrote there.
    """
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is no folder; give the output_dir of a run")
    if _is_run(output_dir):
        return _state(output_dir)
    folders = sorted(folder for folder in output_dir.iterdir() if folder.is_dir() and _is_run(folder))
    if not folders:
        raise ValueError(
            f"{output_dir} is not the output_dir of a run: it holds no {' or '.join(_RESULTS)}, and no"
            f" {FOLDER} or status of a run that goes on or died"
        )
    found = [
        replace(finding, what=f"{folder.name}: {finding.what}")
        for folder in folders
        for finding in _state(folder)
    ]
    return found + _missing_parts(folders)


def _is_run(folder: Path) -> bool:
    left = [*folder.glob(f"{FOLDER}/*/rank-*.bin"), *folder.glob(f"{FOLDER}/*/{PLAN_FILE}")]
    return bool(left or list(folder.glob("status/*.json"))) or any((folder / n).is_file() for n in _RESULTS)


def _missing_parts(folders: Sequence[Path]) -> list[Finding]:
    named = [match for folder in folders if (match := re.fullmatch(r"part-(\d+)-of-(\d+)", folder.name))]
    if not named:
        return []
    num_parts = max(int(match[2]) for match in named)
    missing = sorted(set(range(1, num_parts + 1)) - {int(m[1]) for m in named if int(m[2]) == num_parts})
    remedy = f"run them (part={missing[0]}/{num_parts}) before ppl-eval merge" if missing else ""
    return [Finding("parts", f"{num_parts}", f"missing: {rank_ranges(missing) or 'none'}", remedy)]


def _state(output_dir: Path) -> list[Finding]:
    hosts, damaged = read_statuses(output_dir)
    ledgers = [_ledger(folder) for folder in sorted((output_dir / FOLDER).glob("*")) if folder.is_dir()]
    ledgers = [book for book in ledgers if book.num_records or hosts]
    done = [output_dir / name for name in _RESULTS if (output_dir / name).is_file()]
    findings = [_life(hosts, ledgers, done)]
    findings += [_progress(book, hosts, output_dir) for book in ledgers]
    findings += _ranks(hosts)
    findings += [Finding("status file", "whole", line, "it is ignored") for line in damaged]
    findings += [finding for book in ledgers for finding in book.findings]
    return [*findings, _resume(ledgers, done, alive=bool(hosts) and _dead_because(hosts) is None)]


def _dead_because(hosts: Sequence[HostStatus]) -> str | None:
    """Return why a run whose hosts left these files goes on no more; None if it seems to."""
    for host in hosts:
        if host.content["failure"]:
            failure = host.content["failure"]
            return f"{failure['message']} (exit code {failure['code']})"
    gone = [rank for host in hosts for rank in host.ranks if _is_gone(host, rank)]
    if gone:
        return f"rank {rank_ranges(sorted(gone))} is gone without a word: killed, or its machine restarted"
    silent = [host for host in hosts if host.age > _OLD_SECONDS]
    if silent:
        names = ", ".join(f"{host.content['host']} ({host.age:,.0f} s)" for host in silent)
        return f"no sign of life from {names}"
    return None


def _is_gone(host: HostStatus, rank: int) -> bool:
    about = host.ranks[rank]
    return host.here and not about.get("left") and neighbours.is_gone(str(about.get("process", "")))


def _life(hosts: Sequence[HostStatus], ledgers: Sequence[_Ledger], done: Sequence[Path]) -> Finding:
    if hosts:
        why = _dead_because(hosts)
        ranks = f"{hosts[0].content['world_size']} rank(s) on {hosts[0].content['num_nodes']} host(s)"
        if why is None:
            return Finding("state", "", f"running, {ranks}")
        return Finding("state", "running", f"ended: {why}", _AGAIN)
    if any(book.num_records for book in ledgers):
        return Finding("state", "running", "ended, and left no word why", _AGAIN)
    if done:
        result = read_json_object(done[0])
        what = f"perplexity {result.get('perplexity')}" if done[0].name == "result.json" else "a part"
        return Finding("state", "", f"finished: {what}, key {result.get('key')}")
    return Finding("state", "", "nothing was scored here")


def _ledger(folder: Path) -> _Ledger:
    findings, facts = [], {}
    try:
        facts = read_json_object(folder / PLAN_FILE)
        if plan_key(facts) != folder.name:
            raise ValueError(f"{folder / PLAN_FILE} says key {plan_key(facts)}")
    except (OSError, ValueError) as error:
        remedy = "nothing can go on from it; resume=never keeps it aside"
        findings.append(Finding(f"ledger {folder.name}", f"a {PLAN_FILE} of this key", str(error), remedy))
        return _Ledger(folder.name, np.zeros(0, dtype=np.bool_), 0, {}, findings)
    recorded_W = np.zeros(int(facts["num_windows"]), dtype=np.bool_)
    num_records = num_doubled = 0
    for file in rank_files(
        folder, record_dtype(facts.get("position_buckets") or 0, bool(facts.get("reference")))
    ):
        ids = file.records["window_id"]
        known = ids[(ids >= 0) & (ids < len(recorded_W))]
        new = np.unique(known[~recorded_W[known]])
        num_records += len(new)
        num_doubled += len(ids) - len(new)
        recorded_W[new] = True
        wrong = [f"{file.num_damaged} damaged"] if file.num_damaged else []
        wrong += [f"{file.torn_bytes} bytes of a torn one at the end"] if file.torn_bytes else []
        left_out = int((file.records["num_excluded"] > 0).sum())
        about = [f"{left_out:,} of windows that are left out (nan: exclude)"] if left_out else []
        shown = f"{len(ids):,} whole records" + "".join(f", {text}" for text in about + wrong)
        needed = "whole records; others are left out and scored again" if wrong else "whole records"
        findings.append(Finding(f"ledger {folder.name}: {file.path.name}", needed, shown))
    if num_doubled:
        # Runs that died scored the rest of a batch, and it was scored again, with the same bits.
        shown = f"{num_doubled:,} records of windows that have one already; each window counts once"
        findings.append(Finding(f"ledger {folder.name}", "", shown))
    return _Ledger(folder.name, recorded_W, num_records, facts, findings)


def _share(book: _Ledger, output_dir: Path) -> slice:
    """Return the batches of the run: all, or those of a part."""
    num_batches = -(-len(book.recorded_W) // int(book.facts.get("batch_size", 1)))
    match = re.fullmatch(r"part-(\d+)-of-(\d+)", output_dir.name)
    if match is None:
        return slice(0, num_batches)
    return slice(*(num_batches * i // int(match[2]) for i in (int(match[1]) - 1, int(match[1]))))


def _progress(book: _Ledger, hosts: Sequence[HostStatus], output_dir: Path) -> Finding:
    share, size = _share(book, output_dir), int(book.facts.get("batch_size", 1))
    expected = book.recorded_W[share.start * size : share.stop * size]
    recorded, total = int(expected.sum()), len(expected)
    shown = f"{recorded:,} of {total:,} windows ({recorded / max(total, 1):.0%})"
    scoring = [
        (about["num_windows"], about["seconds"])
        for host in hosts
        for about in host.ranks.values()
        if about.get("phase") == "scoring" and about["num_windows"]
    ]
    if scoring and _dead_because(hosts) is None:
        speed = sum(windows / max(seconds, 1e-9) for windows, seconds in scoring)
        shown += f", {speed:,.2f} windows/s, about {(total - recorded) / speed:,.0f} s left"
    return Finding(f"progress of {book.key}", "", shown)


def _ranks(hosts: Sequence[HostStatus]) -> list[Finding]:
    abouts = {rank: about for host in hosts for rank, about in host.ranks.items()}
    scored = [about["num_windows"] for about in abouts.values() if "num_windows" in about]
    usual = statistics.median(scored) if scored else 0
    findings = []
    for host in hosts:
        for rank, about in sorted(host.ranks.items()):
            what, silence = f"rank {rank} on {host.content['host']}", about["silent"] + host.age
            if "phase" not in about:
                findings.append(Finding(what, "", "done" if about.get("left") else "has not spoken yet"))
                continue
            shown = (
                f"{describe(about['phase'], about['window'])}, {about['num_windows']:,} windows,"
                f" {about['seconds']:,.0f} s in this phase, heard {silence:,.0f} s ago"
            )
            remedy = ""
            if any(other.content["failure"] for other in hosts):
                pass  # Why they are gone is known.
            elif _is_gone(host, rank):
                remedy = f"its process is gone: see dmesg on {host.content['host']}"
            elif silence > _OLD_SECONDS:
                remedy = f"look at it on {host.content['host']}: stopped, swapping, or cut off"
            elif usual >= _ENOUGH_WINDOWS and about["num_windows"] < _SLOW * usual:
                remedy = f"a straggler: half of the ranks have scored {usual:,.0f} windows or more"
            findings.append(Finding(what, "", shown, remedy))
    return findings


def _resume(ledgers: Sequence[_Ledger], done: Sequence[Path], *, alive: bool) -> Finding:
    what = "if it ended now, resume" if alive else "resume"
    books = [book for book in ledgers if book.num_records]
    if not books:
        again = " and writes the same result again" if done else ""
        return Finding(what, "", f"the same command starts from the beginning{again}")
    if len(books) > 1:
        keys = ", ".join(book.key for book in books)
        remedy = "finish each by its own settings, or resume=never to start over"
        return Finding(what, "records of one evaluation", f"refuses: there are those of {keys}", remedy)
    (book,) = books
    size = int(book.facts["batch_size"])
    starts = np.arange(0, len(book.recorded_W), size)
    whole = np.minimum.reduceat(book.recorded_W, starts)
    lost = book.num_records - int(np.add.reduceat(book.recorded_W, starts)[whole].sum())
    shown = f"goes on from {int(whole.sum()):,} of {len(whole):,} batches of the plan"
    shown += f"; {lost:,} windows of unfinished batches are scored again" if lost else ""
    known = book.facts.get("versions", {})
    here = {name: found for name, found in versions().items() if name in known}
    if differing := describe_differences({"versions": here}, {"versions": known}):
        remedy = f"with what is installed here it is refused, since bits may differ: {differing.strip()}"
        return Finding(what, "the same versions", shown, remedy)
    return Finding(what, "", shown)
