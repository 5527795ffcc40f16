"""Samples with labels as a source: tokens, labels and document boundaries, whatever made them.

The sum over samples is what a training run's token-weighted validation loss should be: each sample is a
document of its own, a label of -100 is never scored, and neither is a document's first token.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.data.array_cache import ArrayWriter
from ppl_eval.data.sources import ALL, Content, EncodeRequest, Written
from ppl_eval.data.tokenize import token_dtype

Ids = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """Tokens of one sample, and labels that are not shifted: each is its own token, or -100.

    Attributes:
        tokens: the tokens, int64.
        labels: the labels, int64.
        sizes: bytes of each token that is a target, and how many words begin in it behind the sample's first;
            int64 [2, tokens]. None where they are not known.
    """

    tokens: Ids
    labels: Ids
    sizes: Ids | None = None

    def num_scored(self) -> int:
        """Count its targets; its first token never is one."""
        return int(np.count_nonzero(self.labels[1:] != CROSS_ENTROPY_IGNORE_IDX))


@dataclass
class SampleCounts:
    """What the notes say about the samples of a domain; ``remarks`` are those of the form that they had."""

    num_samples: int = 0
    num_scored_tokens: int = 0
    num_empty: int = 0
    num_unscored: int = 0
    remarks: list[str] = field(default_factory=list)


# Makes the samples of a domain for a request; appends to the remarks of the counts.
MakeSamples = Callable[[EncodeRequest, SampleCounts], Iterator[Sample]]


@dataclass(frozen=True)
class SampleSource:
    """Samples with labels.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        domains: domain to what makes its samples.
    """

    name: str
    parameters: dict[str, Any]
    domains: dict[str, MakeSamples]

    def stamp(self) -> None:
        """Return None: what a dataset holds is known only after it was made."""

    def identify(self, request: EncodeRequest) -> Content:
        """Make all samples, and hash them.

        Raises:
            ValueError: if a sample is not what it should be, nothing is to be scored, or the request joins.
        """
        if request.join is not None:
            raise ValueError(
                "protocol: this protocol joins documents, and samples with labels cannot be joined; use "
                "ppl_eval.protocols.per_sample"
            )
        facts, counts = self._read(request, lambda domain, sample: None)
        num_samples = sum(count.num_samples for count in counts.values())
        if not any(count.num_scored_tokens for count in counts.values()):
            raise ValueError(
                f"dataset: none of the {num_samples} samples has a token to score: every label is -100 (or "
                "the sample is a single token). Is the prompt all there is, is train_on_input or "
                "masking_strategy off, or max_seq_len too short?"
            )
        notes = [
            note if name == ALL else f"{name}: {note}"
            for name, count in counts.items()
            for note in _notes(count)
        ]
        if request.bos in ("always", "never"):
            notes.append(
                f"samples keep the BOS that their dataset gave them; protocol.bos={request.bos} changes "
                "nothing"
            )
        return Content(facts, tuple(notes))

    def write(self, folder: Path, request: EncodeRequest, content: Content) -> Written:
        """Make all samples again, and write them.

        Raises:
            ValueError: if they are not those that ``identify`` saw.
        """
        writer = _SampleWriter(folder, request)
        facts, counts = self._read(request, writer.add)
        if facts != content.facts:
            raise ValueError(
                "the dataset gave other samples when it was read again: it changed meanwhile, or it draws at "
                "random, and then no number of it can be repeated"
            )
        num_samples = sum(count.num_samples for count in counts.values())
        return Written(writer.close(), list(self.domains), num_samples, notes=[])

    def merge(self, sources: "Mapping[str, SampleSource]") -> "SampleSource":
        """Return one source of several, each a domain."""
        domains = {name: make for name, source in sources.items() for make in source.domains.values()}
        parameters = {name: {"name": source.name, **source.parameters} for name, source in sources.items()}
        return SampleSource("domains", {"sources": parameters}, domains)

    def _read(
        self, request: EncodeRequest, use: Callable[[int, Sample], None]
    ) -> tuple[dict[str, str], dict[str, SampleCounts]]:
        """Make all samples and give each, with its domain's number, to ``use``.

        Returns:
            The hash of the samples, and each domain's counts.
        """
        digest = hashlib.sha256()
        counts = {name: SampleCounts() for name in self.domains}
        for domain, (name, make) in enumerate(self.domains.items()):
            count = counts[name]
            for sample in make(request, count):
                if len(sample.tokens) == 0:
                    count.num_empty += 1
                    continue
                count.num_samples += 1
                count.num_scored_tokens += sample.num_scored()
                count.num_unscored += sample.num_scored() == 0
                use(domain, sample)
                digest.update(len(sample.tokens).to_bytes(8, "little"))
                digest.update(sample.tokens.astype("<i8").tobytes() + sample.labels.astype("<i8").tobytes())
                if sample.sizes is not None:
                    digest.update(b"sizes" + sample.sizes.astype("<i8").tobytes())
            digest.update(name.encode() + b"\0")
        return {"samples_sha256": digest.hexdigest()}, counts


class _SampleWriter:
    """Writes samples as arrays; bytes and words only where all samples have them."""

    def __init__(self, folder: Path, request: EncodeRequest) -> None:
        kinds = {"tokens": token_dtype(request), "labels": np.int32, "offsets": np.int64, "domain": np.int32}
        kinds |= {
            "token_bytes": np.uint32,
            "token_words": np.uint32,
            "num_bytes": np.int64,
            "num_words": np.int64,
        }
        self._columns = {name: ArrayWriter(folder / f"{name}.bin", kind) for name, kind in kinds.items()}
        self._columns["offsets"].append(0)
        self._is_measured = True

    def add(self, domain: int, sample: Sample) -> None:
        columns = self._columns
        columns["tokens"].extend(sample.tokens)
        columns["labels"].extend(sample.labels)
        columns["offsets"].append(columns["tokens"].length)
        columns["domain"].append(domain)
        self._is_measured = self._is_measured and sample.sizes is not None
        if not self._is_measured or sample.sizes is None:
            return
        for what, values in zip(("bytes", "words"), sample.sizes, strict=True):
            columns[f"token_{what}"].extend(values)
        num_bytes, num_words = sample.sizes.sum(axis=1).tolist()
        columns["num_bytes"].append(num_bytes)
        # A text has a word more than places where further words begin.
        columns["num_words"].append(num_words + 1)

    def close(self) -> dict[str, Any]:
        measures = ("token_bytes", "token_words", "num_bytes", "num_words")
        if not self._is_measured:
            for name in measures:
                self._columns.pop(name).path.unlink()
        return {name: column.close() for name, column in self._columns.items()}


def _notes(counts: SampleCounts) -> list[str]:
    notes = list(counts.remarks)
    if counts.num_unscored:
        notes.append(f"{counts.num_unscored} samples have no token to score (all labels are -100)")
    if counts.num_empty:
        notes.append(f"{counts.num_empty} samples are empty")
    return notes
