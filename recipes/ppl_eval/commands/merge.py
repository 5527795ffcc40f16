"""Join the parts of a run (``part: 3/16``) to the result that one run would have given, bit by bit.

Nothing is scored here. The text is read again, because figures need documents and their sizes, so the data of
the config must be reachable; the model need not be.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf

from ppl_eval.config.components import instantiate
from ppl_eval.config.parts import read_part
from ppl_eval.config.settings import Settings, check
from ppl_eval.distributed.agreement import rank_ranges
from ppl_eval.distributed.process import connect
from ppl_eval.distributed.rendezvous import meet
from ppl_eval.metrics import figures
from ppl_eval.metrics.accumulator import Accumulator
from ppl_eval.metrics.window_records import Records, form_of, in_order
from ppl_eval.protocols.batches import expected_hash_sums
from ppl_eval.results import excluded, parquet_files, result
from ppl_eval.results.joined import join
from ppl_eval.results.ledger import FOLDER, lock_output_dir, read_ledger
from ppl_eval.results.previous import set_aside
from ppl_eval.results.provenance import merged_facts
from ppl_eval.results.resume import describe_differences, read_facts
from ppl_eval.results.table import check_output_dir
from ppl_eval.run.inputs import Inputs, read_inputs
from ppl_eval.run.share import share_of


class Part(NamedTuple):
    """A part that is done: its folder, what ``part.json`` says, and the facts that its key is made of."""

    folder: Path
    about: dict[str, Any]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """The part, for messages."""
        return f"part {self.about['part']} in {self.folder}"

    @property
    def ledger(self) -> Path:
        """The folder of its records."""
        return self.folder / FOLDER / self.about["key"]


def merge(folders: Sequence[Path], output_dir: Path) -> dict[str, Any]:
    """Join parts and write the result.

    Args:
        folders: of parts, or above the folders of parts.
        output_dir: where ``result.json`` and the tables go.

    Returns:
        The result.

    Raises:
        ValueError: for a part that is missing, given twice, not whole, or of another evaluation, and for data
            that are not those of the parts.
    """
    started = datetime.now(UTC)
    parts = check_parts([read for folder in folders for read in find_parts(folder)])
    settings = _settings(parts[0], output_dir)
    section = settings.metric_logger
    metric_logger = instantiate("metric_logger", section) if section is not None else None
    process = connect(settings.timeout_seconds)
    world, _ = meet(process, lambda: None, lambda _: {})
    inputs = read_inputs(settings, world)
    _check_inputs(parts[0], inputs)
    records = in_order(np.concatenate([_read_records(part, inputs, settings) for part in parts]))
    compared = settings.reference is not None
    sums = Accumulator(inputs.plan, inputs.data, settings.position_buckets or 0, compared=compared)
    sums.add(records)
    sums.run.totals.expected_hash_sums = expected_hash_sums(inputs.plan, inputs.data, 0, 1)
    sums.check_coverage(inputs.expected_tokens, inputs.plan.num_windows)
    sums.check_not_empty()

    check_output_dir(output_dir)
    lock = lock_output_dir(output_dir)
    try:
        if moved := set_aside(output_dir, parts[0].about["key"], None):
            print(moved)
        ledgers = [part.ledger for part in parts]
        parquet_files.write_tables(
            settings,
            inputs,
            records,
            ledgers,
            excluded_W=sums.excluded_W,
            world=world,
            add_over_ranks=_alone,
        )
        found = join(settings, inputs, records, ledgers, world=world, add_over_ranks=_alone)
        measured = result.measured(settings, inputs, sums, inputs.expected_tokens, found)
        joined = join_results([part.about for part in parts], measured)
        joined["notes"] += [*excluded.note(sums, inputs), *figures.words_note(measured)]
        joined["run"] = merged_facts(world, started, [part.about for part in parts])
        result.publish(settings, joined, output_dir / "result.json", metric_logger)
        if metric_logger is not None:
            metric_logger.close()
    finally:
        lock.release()
    return joined


def find_parts(folder: Path) -> list[Part]:
    """Return the parts in a folder: it is one, or holds folders that are.

    Raises:
        ValueError: if there are none, or a file is damaged.
    """
    paths = [folder / result.PART_RESULT]
    if not paths[0].is_file():
        paths = sorted(folder.glob(f"part-*-of-*/{result.PART_RESULT}"))
    if not paths:
        raise ValueError(
            f"{folder} holds no finished part: neither {result.PART_RESULT} nor"
            f" part-*-of-*/{result.PART_RESULT}"
        )
    return [_read_part(path) for path in paths]


def _read_part(path: Path) -> Part:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        read_part(about["part"])
        if not isinstance(about["config"], dict) or "/" in about["key"]:
            raise ValueError("not a part")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no part of a run: {error}") from error
    return Part(path.parent, about, read_facts(path.parent / FOLDER / about["key"]))


def check_parts(parts: Sequence[Part]) -> list[Part]:
    """See that the parts are all parts of one run, each once; return them in order.

    Raises:
        ValueError: names each part that is foreign, doubled or missing.
    """
    first = parts[0]
    num_parts = read_part(first.about["part"])[1]
    found: dict[int, Part] = {}
    for part in parts:
        index, of = read_part(part.about["part"])
        if part.about["key"] != first.about["key"]:
            raise ValueError(
                f"{part.name} is of another evaluation than {first.name}: their keys are {part.about['key']}"
                f" and {first.about['key']}. What differs:\n{describe_differences(part.facts, first.facts)}"
            )
        if of != num_parts:
            raise ValueError(f"{part.name} is of another division than {first.name}")
        if index in found:
            raise ValueError(f"{part.name} is there twice: also in {found[index].folder}")
        found[index] = part
    missing = [index for index in range(1, num_parts + 1) if index not in found]
    if missing:
        raise ValueError(f"of {num_parts} parts, {len(missing)} are missing: {rank_ranges(missing)}")
    return [found[index] for index in sorted(found)]


def _settings(part: Part, output_dir: Path) -> Settings:
    config = {**part.about["config"], "part": None, "output_dir": str(output_dir)}
    return check(OmegaConf.create(config))


def _check_inputs(part: Part, inputs: Inputs) -> None:
    facts = {
        "data": inputs.data.fingerprint,
        "tokenizer": inputs.encoder.sha256,
        "num_windows": inputs.plan.num_windows,
    }
    if differing := describe_differences(facts, {name: part.facts.get(name) for name in facts}):
        raise ValueError(f"the data on this machine are not those of {part.name}:\n{differing}")


def _read_records(part: Part, inputs: Inputs, settings: Settings) -> Records:
    wanted = np.sort(inputs.plan.ids(*share_of(part.about["part"], inputs).places))
    records = read_ledger(part.ledger, form_of(settings))
    if not np.array_equal(records["window_id"], wanted):
        missing = np.setdiff1d(wanted, records["window_id"])
        raise ValueError(
            f"{part.name} should hold the records of {len(wanted)} windows between {wanted[0]} and"
            f" {wanted[-1]}, and {len(missing)} of them are missing or damaged in {part.ledger}: run the part"
            " again, which scores what is missing"
            if len(missing)
            else f"{part.name} holds records of windows that are not its own"
        )
    return records


def join_results(parts: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of the whole: what was measured, and what the parts say of their runs."""
    joined = {**parts[0], **measured}
    del joined["part"], joined["config"]
    joined["plan"] = {
        **joined["plan"],
        "windows_in_parts": sum(part["plan"]["windows_in_parts"] for part in parts),
        "resumed_batches": 0,
        "num_parts": len(parts),
    }
    timings = [part["timing"] for part in parts]
    speed = {
        name: max(timing[name] for timing in timings)
        for name in timings[0]
        if name not in ("tokens_per_second", "per_rank")
    }
    speeds = [timing["tokens_per_second"] for timing in timings]
    joined["timing"] = {**timings[0], **speed, "tokens_per_second": sum(speeds)}
    notes = [note for part in parts for note in part["notes"] if not excluded.is_note(note)]
    joined["notes"] = list(dict.fromkeys(notes))
    joined["notes"].append(f"joined from {len(parts)} parts")
    return joined


def _alone(vector: Any) -> Any:
    return vector
