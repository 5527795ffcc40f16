"""Rows of tables: JSON lines, JSON, CSV, Parquet, Arrow and Hugging Face datasets.

The ``datasets`` library reads the binary formats and the hub. JSON and CSV are read here, because a broken
line must be named by its number, and because readers made for data frames turn texts such as "NA", "null" and
"007" into something else.
"""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_eval.config.retries import retry
from ppl_eval.data.documents import Part
from ppl_eval.data.input_files import COMPRESSED, open_binary
from ppl_eval.data.sources import ALL

TABLES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_LARGEST_FIELD = 1 << 31
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Columns:
    """What to take from a table.

    Attributes:
        text: column of the texts.
        domain: column of the domains; None for one domain.
        skip_bad: leave out broken lines and values that are no text, and note how many; else they are errors.
    """

    text: str
    domain: str | None = None
    skip_bad: bool = False

    def names(self) -> list[str]:
        """Return the columns that are read."""
        return [self.text] if self.domain is None else [self.text, self.domain]


class _Bad(ValueError):
    """A row that cannot be scored."""


class _Doubled(dict[str, Any]):
    """A JSON object in which keys occur more than once; the last value of each is kept.

    Attributes:
        doubled: these keys.
    """

    doubled: frozenset[str]


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    keys = [key for key, _ in pairs]
    doubled = _Doubled(row)
    doubled.doubled = frozenset(key for key in keys if keys.count(key) > 1)
    return doubled


def _refuse_doubled_columns(names: Sequence[str], name: str, read: Iterable[str]) -> None:
    for wanted in read:
        if names.count(wanted) > 1:
            raise ValueError(
                f"{name} has {names.count(wanted)} columns named {wanted!r}; which of them is meant is not "
                "clear: rename all but one"
            )


def read_table(file: Path, kind: str, columns: Columns, notes: list[str]) -> Iterator[Part]:
    """Read the texts of a table, one document a row.

    Args:
        file: the file.
        kind: its suffix, one of ``TABLES``.
        columns: what to take.
        notes: gets a line where rows were left out.

    Raises:
        ValueError: if the file is damaged or empty, a column does not exist, or a row is bad and not to be
            skipped.
    """
    if kind in (".jsonl", ".json"):
        rows = _json_rows(file, kind)
    elif kind == ".csv":
        rows = _csv_rows(file, columns)
    else:
        rows = _binary_rows(file, kind.removeprefix("."), columns)
    return _parts(rows, str(file), columns, notes)


def table_of(file: Path) -> str | None:
    """Return the suffix that makes a file a table, one of ``TABLES``; None for one that is none."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in TABLES else None


def table_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Read all columns of a table, with where each row stands.

    Raises:
        ValueError: if the file is damaged, or a line of it is.
    """
    kind = table_of(file)
    if kind in (".jsonl", ".json"):
        rows = _json_rows(file, kind)
    elif kind == ".csv":
        rows = _csv_rows(file, None)
    else:
        rows = _binary_rows(file, str(kind).removeprefix("."), None)
    for where, row in rows:
        if isinstance(row, _Bad):
            raise ValueError(str(row))
        yield where, row


def named_rows(rows: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Read all columns of a Hugging Face dataset, with where each row stands."""
    return _batched_rows(rows, name, None)


def rows_of(rows: Any, name: str, columns: Columns, notes: list[str]) -> Iterator[Part]:
    """Read the texts of a Hugging Face dataset; arguments and errors as for ``read_table``."""
    return _parts(_batched_rows(rows, name, columns), name, columns, notes)


def _parts(rows: Iterable[tuple[str, Any]], name: str, columns: Columns, notes: list[str]) -> Iterator[Part]:
    skipped: list[str] = []
    num_rows = 0
    for where, row in rows:
        num_rows += 1
        try:
            part = _part_of(row, where, columns)
        except _Bad as bad:
            if not columns.skip_bad:
                raise ValueError(
                    f"{bad}; mend it, or leave such rows out with dataset.bad_lines=skip"
                ) from None
            skipped.append(f"{bad}" if not skipped else where)
            continue
        yield part
    if num_rows == len(skipped):
        raise ValueError(
            f"{name} has no rows" if num_rows == 0 else f"all {num_rows} rows of {name} are bad: {skipped[0]}"
        )
    if skipped:
        first = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        notes.append(f"{len(skipped)} of {num_rows} rows of {name} are bad and were skipped: {first}")


def load_saved(folder: Path, split: str | None) -> Any:
    """Map a dataset that ``save_to_disk`` wrote.

    Raises:
        ValueError: if the folder is damaged, or holds several splits (or others) and ``split`` names none of
            them.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"dataset.name: {folder} is no whole dataset of save_to_disk: {error}") from error
    if not isinstance(dataset, datasets.DatasetDict):
        if split is not None:
            raise ValueError(
                f"dataset.split is {split!r}, but {folder} holds a single dataset without splits; leave "
                "split out"
            )
        return dataset
    if split not in dataset:
        raise ValueError(f"dataset.split is {split!r}; {folder} has: {', '.join(dataset)}")
    return dataset[split]


def load_named(name: str, config_name: str | None, *, split: str | None, **arguments: Any) -> Any:
    """Load a dataset by its name on the hub; arguments as for ``datasets.load_dataset``.

    Raises:
        ValueError: if it cannot be loaded; the library's own message says why.
    """
    import datasets

    try:
        return retry(
            lambda: datasets.load_dataset(name, config_name, split=split, **arguments),
            f"dataset {name} of the hub cannot be loaded",
        )
    except Exception as error:
        raise ValueError(
            f"dataset.name: the datasets library cannot load {name!r} (config_name={config_name!r}, "
            f"split={split!r}): {type(error).__name__}: {error}. Without a network, give a folder that "
            "save_to_disk wrote, or use ppl_eval.data.text_files"
        ) from error


def _part_of(row: Any, where: str, columns: Columns) -> Part:
    if isinstance(row, _Bad):
        raise row
    if not isinstance(row, dict):
        raise _Bad(f"{where} is {_shown(row)}, not an object with columns")
    for key, name in (("column", columns.text), ("domain_column", columns.domain)):
        if name is not None and name not in row:
            raise _Bad(
                f"dataset.{key} is {name!r}, which {where} does not have; it has: {', '.join(map(str, row))}"
            )
        if isinstance(row, _Doubled) and name in row.doubled:
            raise _Bad(f"{where} has the key {name!r} more than once; which value is meant is not clear")
    text = row[columns.text]
    if not isinstance(text, str):
        raise _Bad(
            f"{where}: {columns.text!r} is {_shown(text)}, of type {type(text).__name__}; only text can be "
            "scored"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Bad(
            f"{where}: {columns.text!r} holds half a surrogate pair ({text[error.start]!r}), which is no text"
        ) from error
    return Part(text, domain=ALL if columns.domain is None else str(row[columns.domain]))


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


def _json_rows(file: Path, kind: str) -> Iterator[tuple[str, Any]]:
    with open_binary(file) as binary:
        # Many files called .json are JSON lines; a list begins with a bracket.
        if kind == ".json" and _begin(binary) == b"[":
            try:
                rows = json.loads(binary.read(), object_pairs_hook=_object_of)
            except ValueError as error:
                raise ValueError(f"{file} is no JSON: {error}") from error
            for number, row in enumerate(rows, start=1):
                yield f"{file} row {number}", row
            return
        for number, line in enumerate(binary, start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                yield where, json.loads(line, object_pairs_hook=_object_of)
            except ValueError as error:
                yield where, _Bad(f"{where} is no JSON ({error}): {_shown(line)}")


def _begin(binary: io.BufferedReader) -> bytes:
    """Return the first byte that is neither white space nor of a byte order mark."""
    return binary.peek(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


def _csv_rows(file: Path, columns: Columns | None) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(_LARGEST_FIELD)
    with open_binary(file) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        header: list[str] | None = None
        while True:
            where = f"{file} line {reader.line_num + 1}"
            try:
                fields = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 (near line {reader.line_num + 1}): {error}") from error
            except csv.Error as error:
                yield where, _Bad(f"{where} is no CSV ({error})")
                continue
            if header is None:
                header = fields
                read = columns.names() if columns else header
                _refuse_doubled_columns(header, f"{file} (by its first line)", read)
            elif fields and len(fields) != len(header):
                yield where, _Bad(f"{where} has {len(fields)} fields, the first line has {len(header)}")
            elif fields:
                yield where, dict(zip(header, fields, strict=True))


def _binary_rows(file: Path, kind: str, columns: Columns | None) -> Iterator[tuple[str, Any]]:
    import datasets
    import pyarrow

    try:
        names = _column_names(file, kind)
        # The library cannot read a table with any two of one name.
        _refuse_doubled_columns(names, str(file), dict.fromkeys(names))
        rows = datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True)
        yield from _batched_rows(rows, str(file), columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is no whole {kind.capitalize()} file: {error}") from error


def _column_names(file: Path, kind: str) -> list[str]:
    import pyarrow
    from pyarrow import ipc, parquet

    if kind == "parquet":
        return parquet.read_schema(file).names
    with pyarrow.memory_map(str(file)) as mapped:
        try:
            return ipc.open_stream(mapped).schema.names
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            return ipc.open_file(mapped).schema.names


def _batched_rows(rows: Any, name: str, columns: Columns | None) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for table in rows.with_format("arrow").iter(batch_size=256):
        for wanted in columns.names() if columns else ():
            if wanted not in table.column_names:
                key = "column" if columns and wanted == columns.text else "domain_column"
                raise ValueError(
                    f"dataset.{key} is {wanted!r}, which {name} does not have; it has: "
                    f"{', '.join(table.column_names)}"
                )
        for row in (table.select(columns.names()) if columns else table).to_pylist():
            number += 1
            yield f"{name} row {number}", row
