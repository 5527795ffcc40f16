"""What ``evaluate`` returns: the result file as an object."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ppl_eval.config.files import read_json_object, whole_file, write_json
from ppl_eval.results import excluded, table

if TYPE_CHECKING:
    import pandas as pd

_RESULT, _WINDOWS = "result.json", "windows.parquet"


@dataclass(frozen=True, repr=False)
class Result:
    """The result of an evaluation.

    Example:
        >>> result = Result({"perplexity": 2.0, "perplexity_interval_95": [1.5, 2.5], "num_tokens": 8,
        ...                  "ce_loss": 0.693, "protocol": {"name": "disjoint", "max_seq_len": 4}})
        >>> result.perplexity, result.interval, result["num_tokens"]
        (2.0, (1.5, 2.5), 8)
        >>> result
        perplexity 2 (95 %: 1.5 to 2.5) over 8 tokens
        >>> result.to_pandas()["protocol.max_seq_len"].tolist()
        [4]

    Attributes:
        content: everything that result.json holds (docs/result.md).
    """

    content: Mapping[str, Any]
    _windows: pa.Table | None = None

    @property
    def perplexity(self) -> float:
        """Return exp(NLL / tokens); infinite where that overflows, and ``ce_loss`` still tells."""
        return float(self.content["perplexity"])

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the perplexity; None where there are too few windows for one."""
        found = self.content["perplexity_interval_95"]
        return None if found is None else (float(found[0]), float(found[1]))

    @property
    def ce_loss(self) -> float:
        """Return the mean NLL of a scored token, nats."""
        return float(self.content["ce_loss"])

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were scored."""
        return int(self.content["num_tokens"])

    @property
    def windows(self) -> pa.Table:
        """Return one row a window, by its number in the plan (docs/metrics.md names the columns).

        Raises:
            ValueError: on other ranks than 0, and where ``per_window`` was turned off.
        """
        if self._windows is None:
            raise ValueError(
                "the windows are on rank 0, and only with per_window=True, the default of evaluate"
            )
        return self._windows

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row with every number, text and flag of the result, nested ones by dotted name: rows of
        several evaluations make a table. ``windows.to_pandas()`` has the windows."""
        import pandas as pd

        row = pd.json_normalize(dict(self.content))
        plain = [name for name in row if not isinstance(row[name].iloc[0], list | dict)]
        return row[plain]

    def save(self, folder: str | Path) -> Path:
        """Write result.json, and windows.parquet where there are windows, into a folder, which is made.

        Returns:
            The path of result.json.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._windows is not None:
            with whole_file(folder / _WINDOWS, "wb") as file:
                pq.write_table(self._windows, file)
        write_json(folder / _RESULT, self.content)
        return folder / _RESULT

    def __getitem__(self, name: str) -> Any:
        """Return a field of result.json."""
        return self.content[name]

    def __repr__(self) -> str:
        """Return the number in one line."""
        interval = self.interval
        shown = "" if interval is None else f" (95 %: {interval[0]:.6g} to {interval[1]:.6g})"
        left_out = f" (left out: {text})" if (text := excluded.summary(self.content)) else ""
        return f"perplexity {self.perplexity:.8g}{shown} over {self.num_tokens:,} tokens{left_out}"

    def table(self) -> str:
        """Return the table that a run of the recipe prints."""
        return table.table(self.content)


def read_result(folder: Path) -> Result:
    """Read what a run wrote.

    Raises:
        ValueError: if result.json is missing or damaged.
    """
    content = read_json_object(folder / _RESULT)
    windows = folder / _WINDOWS
    return Result(content, pq.read_table(windows) if windows.is_file() else None)
