"""A finished run as its folder holds it: ``result.json`` and those of its Parquet files that belong to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ppl_eval.results.baseline import read_result

_WINDOW_COLUMNS = (
    "window_id",
    "document",
    "domain",
    "start",
    "score_start",
    "stop",
    "num_tokens",
    "nll_sum",
    "content",
)
Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: of its folder, so far as needed to tell it from the others.
        folder: where it lies.
        result: its ``result.json``.
    """

    name: str
    folder: Path
    result: dict[str, Any]

    @cached_property
    def windows(self) -> Columns | None:
        """Windows with scored tokens in the plan's order; None without a table of this very result."""
        columns = self._table("windows.parquet", _WINDOW_COLUMNS)
        if columns is None:
            return None
        scored_W = columns["num_tokens"] > 0
        return {name: values[scored_W] for name, values in columns.items()}

    @cached_property
    def documents(self) -> Columns | None:
        """Documents with scored tokens; likewise."""
        names = ("document", "domain", "num_tokens", "num_bytes", "nll_sum")
        columns = self._table("documents.parquet", names)
        if columns is None:
            return None
        scored_D = columns["num_tokens"] > 0
        return {name: values[scored_D] for name, values in columns.items()}

    def _table(self, name: str, columns: Sequence[str]) -> Columns | None:
        path = self.folder / name
        if not path.is_file() or not set(columns) <= set(pq.read_schema(path).names):
            return None
        table = pq.read_table(path, columns=list(columns))
        found = {column: table[column].to_numpy() for column in columns}
        # A table that an earlier run left there would describe something else.
        same = found["num_tokens"].sum() == self.result["num_tokens"] and math.isclose(
            math.fsum(found["nll_sum"]), self.result["nll_sum"], rel_tol=1e-9
        )
        return found if same else None

    def tokens_of(self, window_ids: Sequence[int]) -> dict[int, pa.Table]:
        """Return the rows of ``tokens.parquet`` of some windows; empty where the run wrote none."""
        path = self.folder / "tokens.parquet"
        if not path.is_dir() or not len(window_ids):
            return {}
        wanted = pa.array([int(window) for window in window_ids], pa.int64())
        table = ds.dataset(path).to_table(filter=ds.field("window_id").isin(wanted))
        return {
            window: table.filter(pc.equal(table["window_id"], window))
            for window in wanted.to_pylist()
            if pc.any(pc.equal(table["window_id"], window)).as_py()
        }


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs from their folders, or from their ``result.json``.

    Raises:
        ValueError: if one is not there, or is no result.
    """
    files = [path if path.suffix == ".json" else path / "result.json" for path in paths]
    for path, file in zip(paths, files, strict=True):
        if not file.is_file():
            raise ValueError(f"{path} is not a finished run: there is no {file}")
    folders = [file.resolve().parent for file in files]
    return [
        Run(name, folder, read_result(str(file)))
        for name, folder, file in zip(_names(folders), folders, files, strict=True)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart; a folder named twice gets a number."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, start=1)]


def per_token(columns: Columns) -> npt.NDArray[np.float64]:
    """Return NLL per token of windows or documents."""
    return np.asarray(columns["nll_sum"] / columns["num_tokens"], dtype=np.float64)
