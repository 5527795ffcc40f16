"""Validation sets as users train on them: the samples of any torchtune dataset.

Packed datasets. torchtune trains a pack with a block-causal mask and positions that start anew in each
sample, so a token sees its own sample and nothing else. A pack is therefore taken apart again: each sample is
scored in a window of its own, with positions from 0, and no mask is needed. The recipes of torchtune 0.6.1
also score the first token of each packed sample against the last of the one before, which it cannot see; that
target does not exist here. Where ``split_across_pack`` cut a sample, its second half is a sample that starts
without context, as it did in training (rotary positions are relative, so that they start at 0 changes nothing
but rounding).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.data.length_limit import LimitEffects, without_side_effects
from ppl_eval.data.samples import Ids, Sample, SampleCounts, SampleSource
from ppl_eval.data.sources import ALL, EncodeRequest
from ppl_eval.tokenization.tokenizer import TextEncoder


@dataclass
class _Counts:
    """What the remarks say."""

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
            "_component_ such as torchtune.datasets.alpaca_dataset"
        )
    section = dict(dataset)
    return SampleSource("sft", {"dataset": section}, {ALL: partial(_samples, section)})


def _samples(
    section: dict[str, Any], request: EncodeRequest, sample_counts: SampleCounts
) -> Iterator[Sample]:
    encoder, counts = request.encoder, _Counts()
    dataset, effects = _build(section, encoder)
    component = section["_component_"]
    num_indices = len(dataset)
    # Packs are made when the dataset is built, other samples each time that they are read.
    built = replace(effects)
    shifted_where_unclear = _first_clear(dataset, component, num_indices)
    effects.num_masked, effects.num_replaced = built.num_masked, built.num_replaced
    for index in range(num_indices):
        tokens, labels, ends = _read(dataset, index, component)
        counts.num_packs += len(ends) > 1
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            found = Sample(tokens[begin:end], labels[begin:end])
            is_shifted = _is_shifted(found, shifted_where_unclear)
            if is_shifted is None:
                raise ValueError(
                    f"sample {index} of {component}: its labels are neither its tokens nor its next tokens "
                    "(nor -100); such a dataset trains on something other than next tokens"
                )
            if is_shifted:
                counts.num_shifted += 1
                # In a pack, the last label is the next document's first token, which is no target here.
                is_crossing = len(ends) > 1 and bool(labels[end - 1] != CROSS_ENTROPY_IGNORE_IDX)
                counts.num_crossing += is_crossing
                found = _unshifted(found, keeps_last_label=not is_crossing)
            counts.num_at_limit += len(found.tokens) in _limits(encoder)
            yield found
    sample_counts.remarks += _remarks(counts, effects, encoder)


def _build(section: dict[str, Any], encoder: TextEncoder) -> tuple[Any, LimitEffects]:
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    tokenizer = encoder.tokenizer
    # torchtune's datasets read these, and its wrapper of Hugging Face tokenizers lacks them.
    for name, value in (("max_seq_len", None), ("pad_id", 0)):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, value)
    tokenizer, effects = without_side_effects(tokenizer)
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
    return dataset, effects


def _read(dataset: Any, index: int, component: str) -> tuple[Ids, Ids, list[int]]:
    """Return tokens and labels of a sample, and where the documents in it end (several in a pack)."""
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
    return bool((labels == CROSS_ENTROPY_IGNORE_IDX).all() and (tokens == tokens[:1]).all())


def _fits(sample: Sample) -> tuple[bool, bool]:
    """Return whether the labels that are not masked can be read as not shifted, and as shifted by one."""
    tokens, labels, _ = sample
    kept = labels != CROSS_ENTROPY_IGNORE_IDX
    same = bool((labels == tokens)[kept].all())
    # The last label of a shifted sample is of a token that is not in it: anything will do.
    following = bool((labels[:-1] == tokens[1:])[kept[:-1]].all())
    return same, following


def _first_clear(dataset: Any, component: str, num_indices: int) -> bool:
    """Return whether labels are shifted, by the first sample that leaves no doubt; False if there is none."""
    for index in range(num_indices):
        tokens, labels, ends = _read(dataset, index, component)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            same, following = _fits(Sample(tokens[begin:end], labels[begin:end]))
            if same != following:
                return following
    return False


def _is_shifted(sample: Sample, where_unclear: bool) -> bool | None:
    """Return whether a sample's labels are shifted by one; None where they fit neither way."""
    same, following = _fits(sample)
    if same and following:
        return where_unclear
    return following if same or following else None


def _unshifted(sample: Sample, *, keeps_last_label: bool) -> Sample:
    tokens, labels, _ = sample
    unshifted = np.concatenate([np.full(min(1, len(labels)), CROSS_ENTROPY_IGNORE_IDX), labels[:-1]])
    if keeps_last_label and len(labels) and labels[-1] != CROSS_ENTROPY_IGNORE_IDX:
        return Sample(np.append(tokens, labels[-1]), np.append(unshifted, labels[-1]))
    return Sample(tokens, unshifted)


def _limits(encoder: TextEncoder) -> tuple[int, ...]:
    # torchtune cuts chats to max_seq_len tokens, text completion to one less.
    limit = getattr(encoder.tokenizer, "max_seq_len", None)
    return (limit, limit - 1) if limit else ()


def _remarks(counts: _Counts, effects: LimitEffects, encoder: TextEncoder) -> list[str]:
    notes = []
    if counts.num_at_limit:
        notes.append(
            f"{counts.num_at_limit} samples are as long as "
            f"tokenizer.max_seq_len={encoder.tokenizer.max_seq_len} lets them be: torchtune cuts longer ones "
            "without a word, so what is missing was not scored"
        )
    limit = f"tokenizer.max_seq_len={getattr(encoder.tokenizer, 'max_seq_len', None)}"
    if effects.num_masked:
        notes.append(
            f"torchtune's tokenizer masks {effects.num_masked} labels (end tokens) of samples that "
            f"{limit} does not cut; they are scored, as without a limit. A training run with this limit did "
            "not count them"
        )
    if effects.num_replaced:
        notes.append(
            f"torchtune's tokenizer replaces {effects.num_replaced} tokens by EOS in samples that "
            f"{limit} does not cut; they are scored as they are"
        )
    if counts.num_packs:
        notes.append(
            f"{counts.num_packs} packs were taken apart: each sample is scored in a window of its own"
        )
    if counts.num_shifted:
        notes.append(f"the labels of {counts.num_shifted} samples are shifted by one; they were read as such")
    if counts.num_crossing:
        notes.append(
            f"{counts.num_crossing} labels ask for the first token of the next sample in a pack; not scored"
        )
    return notes
