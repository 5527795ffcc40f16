"""Validation sets as users train on them: any torchtune dataset becomes tokens, labels and document
boundaries.

The sum over samples is what a training run's token-weighted validation loss should be: each sample is a
document of its own, a label of -100 is never scored, and neither is a document's first token.

Packed datasets. torchtune trains a pack with a block-causal mask and positions that start anew in each
sample, so a token sees its own sample and nothing else. A pack is therefore taken apart again: each sample is
scored in a window of its own, with positions from 0, and no mask is needed. The recipes of torchtune 0.6.1
also score the first token of each packed sample against the last of the one before, which it cannot see; that
target does not exist here. Where ``split_across_pack`` cut a sample, its second half is a sample that starts
without context, as it did in training (rotary positions are relative, so that they start at 0 changes nothing
but rounding).
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ppl_eval.data.array_store import ArrayWriter
from ppl_eval.data.sources import ALL
from ppl_eval.tokenization.tokenizer import TextEncoder

IGNORE_INDEX = -100
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampleSource:
    """Sections that build torchtune datasets, and the domain of each.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        sections: domain to section.
    """

    name: str
    parameters: dict[str, Any]
    sections: dict[str, dict[str, Any]]

    def merge(self, sources: "Mapping[str, SampleSource]") -> "SampleSource":
        """One source of several, each a domain."""
        sections = {name: section for name, source in sources.items() for section in source.sections.values()}
        return SampleSource("domains", {"sources": sections}, sections)


class Sample(NamedTuple):
    """Tokens of one sample, and labels that are not shifted: each is its own token, or -100."""

    tokens: Ids
    labels: Ids


@dataclass
class _Tally:
    """What the notes tell."""

    num_empty: int = 0
    num_unscored: int = 0
    num_at_limit: int = 0
    num_packs: int = 0
    num_shifted: int = 0
    num_crossing: int = 0


def sft(dataset: Mapping[str, Any]) -> SampleSource:
    """A torchtune dataset, exactly as a training config's ``dataset`` section has it.

    Args:
        dataset: the section: its ``_component_`` (``torchtune.datasets.alpaca_dataset``, ``chat_dataset``,
            ``text_completion_dataset``, or your own) and its arguments. It gets the run's tokenizer, as in
            training.

    Raises:
        ValueError: if it is no section with a ``_component_``.
    """
    if not isinstance(dataset, Mapping) or "_component_" not in dataset:
        raise ValueError(
            f"dataset.dataset is {dataset!r}; it must be the dataset section of a training config, with a "
            "_component_ "
            "such as torchtune.datasets.alpaca_dataset"
        )
    section = dict(dataset)
    return SampleSource("sft", {"dataset": section}, {ALL: section})


def write_samples(
    folder: Path, source: SampleSource, encoder: TextEncoder, join: str | None, bos: str
) -> dict[str, Any]:
    """Make a source's samples and write them into a folder.

    Args:
        folder: an empty folder.
        source: the datasets.
        encoder: the tokenizer.
        join: must be None: samples are not joined.
        bos: BOS policy; a dataset's own transform decides about BOS.

    Returns:
        The description of what was written, for ``tokens.open_tokens``, with what identifies it under
        ``content``.

    Raises:
        ValueError: if a dataset or a sample is not what torchtune's are, or nothing is to be scored.
    """
    if join is not None:
        raise ValueError(
            "protocol: this protocol joins documents, and samples with labels cannot be joined; use "
            "ppl_eval.protocols.per_sample"
        )
    dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
    writers = {
        "tokens": ArrayWriter(folder / "tokens.bin", dtype),
        "labels": ArrayWriter(folder / "labels.bin", np.int32),
        "offsets": ArrayWriter(folder / "offsets.bin", np.int64),
        "domain": ArrayWriter(folder / "domain.bin", np.int32),
    }
    writers["offsets"].append(0)
    digest = hashlib.sha256()
    notes: list[str] = []
    num_scored = num_documents = 0
    for domain, (name, section) in enumerate(source.sections.items()):
        tally = _Tally()
        for sample in _samples(section, encoder, tally):
            writers["tokens"].extend(sample.tokens)
            writers["labels"].extend(sample.labels)
            writers["offsets"].append(writers["tokens"].length)
            writers["domain"].append(domain)
            digest.update(len(sample.tokens).to_bytes(8, "little"))
            digest.update(sample.tokens.astype("<i8").tobytes() + sample.labels.astype("<i8").tobytes())
            here = int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX))
            tally.num_unscored += here == 0
            num_scored += here
            num_documents += 1
        notes += [note if name == ALL else f"{name}: {note}" for note in _notes(tally, encoder)]
        digest.update(name.encode() + b"\0")
    if num_scored == 0:
        raise ValueError(
            f"dataset: none of the {num_documents} samples has a token to score: every label is -100 (or the "
            "sample is a single "
            "token). Is the prompt all there is, is train_on_input or masking_strategy off, or max_seq_len "
            "too short?"
        )
    if bos in ("always", "never"):
        notes.append(f"samples keep the BOS that their dataset gave them; protocol.bos={bos} changes nothing")
    return {
        "arrays": {name: writer.close() for name, writer in writers.items()},
        "domains": list(source.sections),
        "num_documents": num_documents,
        "notes": notes,
        "content": {"samples_sha256": digest.hexdigest()},
    }


def _samples(section: dict[str, Any], encoder: TextEncoder, tally: _Tally) -> Iterator[Sample]:
    dataset = _build(section, encoder)
    component = section["_component_"]
    num_samples = len(dataset)
    shifted_where_unclear = _first_clear(dataset, component, num_samples)
    for index in range(num_samples):
        tokens, labels, ends = _read(dataset, index, component)
        tally.num_packs += len(ends) > 1
        begin = 0
        for end in ends:
            where = f"sample {index} of {component}"
            sample = _unshift(
                tokens[begin:end], labels[begin:end], where, shifted_where_unclear, len(ends) > 1, tally
            )
            begin = end
            if len(sample.tokens) == 0:
                tally.num_empty += 1
                continue
            tally.num_at_limit += len(sample.tokens) in _limits(encoder)
            yield sample


def _build(section: dict[str, Any], encoder: TextEncoder) -> Any:
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    tokenizer = encoder.tokenizer
    # torchtune's datasets read these, and its wrapper of Hugging Face tokenizers lacks them.
    for name, value in (("max_seq_len", None), ("pad_id", 0)):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, value)
    try:
        dataset = instantiate(OmegaConf.create(dict(section)), tokenizer)
    except Exception as error:
        raise ValueError(
            f"dataset.dataset: {section['_component_']} cannot be built: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"dataset.dataset: {section['_component_']} has no length or no index; streams are not supported"
        )
    return dataset


def _read(dataset: Any, index: int, component: str) -> tuple[Ids, Ids, list[int]]:
    """Tokens and labels of a sample, and where the documents in it end (several in a pack)."""
    where = f"sample {index} of {component}"
    try:
        sample = dataset[index]
    except Exception as error:
        hint = ""
        if "not callable" in str(error) or "tokenize_messages" in str(error):
            hint = "; it needs a tokenizer that knows chats, such as the model's own in torchtune.models"
        raise ValueError(f"{where} cannot be made: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(sample, Mapping) or not {"tokens", "labels"} <= set(sample):
        found = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(
            f"{where} has no tokens and labels (it has: {found}); only datasets for fine-tuning are supported"
        )
    if "encoder_input" in sample:
        raise ValueError(f"{where} has images (encoder_input); only text is supported")
    tokens, labels = (np.asarray(sample[key], dtype=np.int64) for key in ("tokens", "labels"))
    if len(tokens) != len(labels):
        raise ValueError(
            f"{where} has {len(labels)} labels for {len(tokens)} tokens; there must be one for each"
        )
    return tokens, labels, _document_ends(sample, tokens, labels)


def _document_ends(sample: Mapping[str, Any], tokens: Ids, labels: Ids) -> list[int]:
    seq_lens = sample.get("seq_lens")
    input_pos = sample.get("input_pos")
    if seq_lens is not None and int(np.sum(np.asarray(seq_lens))) == len(tokens):
        ends = np.cumsum(np.asarray(seq_lens)).tolist()
    elif input_pos is not None and len(input_pos) == len(tokens):
        positions = np.asarray(input_pos)
        ends = [*(np.flatnonzero(positions[1:] <= positions[:-1]) + 1).tolist(), len(tokens)]
    else:
        return [len(tokens)]
    # Padding is one more "document" at the end of a pack: nothing scored in it, one and the same token. (A
    # sample that looks so has nothing to score either.)
    while len(ends) > 1 and _is_padding(tokens[ends[-2] : ends[-1]], labels[ends[-2] : ends[-1]]):
        ends.pop()
    return ends


def _is_padding(tokens: Ids, labels: Ids) -> bool:
    return bool((labels == IGNORE_INDEX).all() and (tokens == tokens[:1]).all())


def _fits(tokens: Ids, labels: Ids) -> tuple[bool, bool]:
    """Whether the labels that are not masked can be read as not shifted, and as shifted by one."""
    kept = labels != IGNORE_INDEX
    same = bool((labels == tokens)[kept].all())
    # The last label of a shifted sample is of a token that is not in it: anything will do.
    following = bool((labels[:-1] == tokens[1:])[kept[:-1]].all())
    return same, following


def _first_clear(dataset: Any, component: str, num_samples: int) -> bool:
    """Whether labels are shifted, by the first sample that leaves no doubt; not shifted if there is none."""
    for index in range(num_samples):
        tokens, labels, ends = _read(dataset, index, component)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            same, following = _fits(tokens[begin:end], labels[begin:end])
            if same != following:
                return following
    return False


def _unshift(
    tokens: Ids, labels: Ids, where: str, shifted_where_unclear: bool, is_packed: bool, tally: _Tally
) -> Sample:
    same, following = _fits(tokens, labels)
    if not same and not following:
        raise ValueError(
            f"{where}: its labels are neither its tokens nor its next tokens (nor -100); such a dataset "
            "trains on something "
            "other than next tokens"
        )
    if same and not (following and shifted_where_unclear):
        return Sample(tokens, labels)
    tally.num_shifted += 1
    unshifted = np.concatenate([np.full(min(1, len(labels)), IGNORE_INDEX), labels[:-1]])
    if len(labels) and labels[-1] != IGNORE_INDEX:
        if is_packed:
            # The next document's first token, which this document cannot be asked for.
            tally.num_crossing += 1
        else:
            tokens, unshifted = np.append(tokens, labels[-1]), np.append(unshifted, labels[-1])
    return Sample(tokens, unshifted)


def _limits(encoder: TextEncoder) -> tuple[int, ...]:
    # torchtune cuts chats to max_seq_len tokens, text completion to one less.
    limit = getattr(encoder.tokenizer, "max_seq_len", None)
    return (limit, limit - 1) if limit else ()


def _notes(tally: _Tally, encoder: TextEncoder) -> list[str]:
    notes = []
    if tally.num_at_limit:
        notes.append(
            f"{tally.num_at_limit} samples are as long as "
            f"tokenizer.max_seq_len={encoder.tokenizer.max_seq_len} lets them be: "
            "torchtune cuts longer ones without a word, so what is missing was not scored"
        )
    if tally.num_packs:
        notes.append(
            f"{tally.num_packs} packs were taken apart: each sample is scored in a window of its own"
        )
    if tally.num_shifted:
        notes.append(f"the labels of {tally.num_shifted} samples are shifted by one; they were read as such")
    if tally.num_crossing:
        notes.append(
            f"{tally.num_crossing} labels ask for the first token of the next sample in a pack; not scored"
        )
    if tally.num_unscored:
        notes.append(f"{tally.num_unscored} samples have no token to score (all labels are -100)")
    if tally.num_empty:
        notes.append(f"{tally.num_empty} samples are empty")
    return notes
