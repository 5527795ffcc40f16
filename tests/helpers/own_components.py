"""What a user writes for themselves: torchtune datasets, and a source of data with the tool's interface."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ppl_eval.data.array_cache import ArrayWriter
from ppl_eval.data.sources import Content, EncodeRequest, Written


class ListDataset(Dataset):
    """Samples of a list."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def list_dataset(tokenizer: Any, samples: list[dict[str, Any]]) -> ListDataset:
    return ListDataset(samples)


def packed_list_dataset(
    tokenizer: Any, samples: list[dict[str, Any]], max_seq_len: int, split_across_pack: bool
) -> Any:
    from torchtune.datasets import PackedDataset

    return PackedDataset(ListDataset(samples), max_seq_len=max_seq_len, split_across_pack=split_across_pack)


class RandomDataset(ListDataset):
    """Samples with another last token whenever they are asked for."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = [3, 4, *np.random.default_rng().integers(5, 250, 20).tolist()]
        return {"tokens": tokens, "labels": tokens}


def random_dataset(tokenizer: Any) -> RandomDataset:
    return RandomDataset([{}, {}])


@dataclass(frozen=True)
class Countdown:
    """Documents of ids that count down: ``sizes`` [3, 2] is [3, 2, 1], [2, 1]."""

    sizes: list[int]
    remark: str = ""
    name: str = field(default="countdown", init=False)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "remark": self.remark}

    def stamp(self) -> Any:
        return None

    def identify(self, request: EncodeRequest) -> Content:
        facts = {"countdown_sha256": hashlib.sha256(repr(self.sizes).encode()).hexdigest()}
        return Content(facts, notes=(self.remark,) if self.remark else ())

    def write(self, folder: Path, request: EncodeRequest, content: Content) -> Written:
        tokens = ArrayWriter(folder / "tokens.bin", np.uint16)
        offsets = ArrayWriter(folder / "offsets.bin", np.int64)
        offsets.append(0)
        for size in self.sizes:
            tokens.extend(np.arange(size, 0, -1))
            offsets.append(tokens.length)
        arrays = {"tokens": tokens.close(), "offsets": offsets.close()}
        return Written(arrays, ["all"], len(self.sizes), notes=[])

    def merge(self, sources: "Mapping[str, Countdown]") -> "Countdown":
        return Countdown([size for source in sources.values() for size in source.sizes])
