"""Validation sets of torchtune: the same sum as a float64 validation loss over the same samples."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as MASKED
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import Qwen2Tokenizer
from torchtune.models.qwen2_5._tokenizer import Qwen2_5Tokenizer

from helpers.own_components import ListDataset
from helpers.sources import tokens_of
from helpers.texts import ALPACA
from helpers.tiny_tokenizers import hf_encoder, llama3_tokenizer, qwen2_tokenizer
from ppl_eval.data import domains, sft
from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols import per_sample
from ppl_eval.protocols.batches import WindowBatches, expected_hash_sums, masked_targets
from ppl_eval.protocols.plan import make_plan
from ppl_eval.scoring.nll import ScoringModel, window_scores
from ppl_eval.tokenization.tokenizer import TextEncoder, wrap_tokenizer

LIST, PACKED = "helpers.own_components.list_dataset", "helpers.own_components.packed_list_dataset"


def listed(*samples: tuple[list[int], list[int]]) -> Any:
    made = [{"tokens": tokens, "labels": labels} for tokens, labels in samples]
    return sft({"_component_": LIST, "samples": made})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    folder = tmp_path_factory.mktemp("llama3")
    return wrap_tokenizer(llama3_tokenizer(folder), {"path": str(folder / "tokenizer.model")})


@pytest.fixture(scope="module")
def model(encoder: TextEncoder) -> Any:
    torch.manual_seed(0)
    # Llama 3's special tokens have ids far above this vocabulary of bytes.
    return (
        llama3_2(
            vocab_size=encoder.vocab_size,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            embed_dim=16,
            max_seq_len=512,
            intermediate_dim=32,
        )
        .double()
        .eval()
    )


def made(source: Any, encoder: TextEncoder, cache: Path, bos: str = "tokenizer") -> TokenData:
    return tokens_of(source, encoder, cache, bos=bos)


def documents(data: TokenData) -> list[tuple[list[int], list[int]]]:
    bounds = data.offsets_D1.tolist()
    return [(data.tokens[a:b].tolist(), data.labels[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def ours(data: TokenData, model: Any, batch_size: int) -> tuple[float, int]:
    """NLL and scored tokens by this project's way: plan, batches, scoring."""
    plan = make_plan(per_sample(512), data.offsets_D1, batch_size)
    batches = WindowBatches(plan, data)
    scorer = ScoringModel(model, 1 << 24)
    nll, num_tokens = 0.0, 0
    hash_sums = np.zeros(4, dtype=np.uint64)
    with torch.no_grad():
        for b in range(plan.num_batches):
            batch = batches[b]
            nll_N, correct_N = scorer(batch.tokens_BT, batch.labels_BT)
            scores = window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))
            nll += math.fsum(scores.nll_sum_B)
            num_tokens += int(scores.num_tokens_B.sum())
            hash_sums += batch.scored_hash_sums_B4.sum(axis=0)
    assert num_tokens == plan.expected_targets() - masked_targets(plan, data)
    assert (
        hash_sums
        == sum((expected_hash_sums(plan, data, r, 3) for r in range(3)), start=np.zeros(4, np.uint64))
    ).all()
    return nll, num_tokens


def reference(samples: Any, model: Any) -> tuple[float, int]:
    """The same from torchtune's samples, one at a time, in float64, as its recipes shift labels."""
    nll, num_tokens = 0.0, 0
    model.requires_grad_(False)
    for i in range(len(samples)):
        tokens, labels = (
            torch.tensor(np.asarray(samples[i][key], dtype=np.int64)) for key in ("tokens", "labels")
        )
        if len(tokens) == 0:
            # A blank line: Llama 3's class makes nothing of it, not even BOS.
            continue
        hidden = model(tokens[None])
        # The scorer of `ours` may have taken the head off this model.
        logits = hidden if hidden.shape[-1] == model.tok_embeddings.num_embeddings else model.output(hidden)
        losses = torch.nn.functional.cross_entropy(
            logits[0, :-1].double(), labels[1:], ignore_index=MASKED, reduction="none"
        )
        nll += float(losses.sum())
        num_tokens += int((labels[1:] != MASKED).sum())
    return nll, num_tokens


def alpaca_section(tmp_path: Path, **arguments: Any) -> dict[str, Any]:
    (tmp_path / "alpaca.json").write_text(json.dumps(ALPACA))
    return {
        "_component_": "torchtune.datasets.alpaca_dataset",
        "source": "json",
        "data_files": str(tmp_path / "alpaca.json"),
        "split": "train",
        "train_on_input": False,
        **arguments,
    }


def chat_section(tmp_path: Path) -> dict[str, Any]:
    turns = [[("user", "Hi"), ("assistant", "Hello there."), ("user", "the end?"), ("assistant", "Yes.")]]
    turns.append([("user", "only a question"), ("assistant", "")])
    rows = [
        {
            "conversations": [
                {"from": "human" if who == "user" else "gpt", "value": text} for who, text in chat
            ]
        }
        for chat in turns
    ]
    (tmp_path / "chat.json").write_text(json.dumps(rows))
    return {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(tmp_path / "chat.json"),
        "split": "train",
        "conversation_column": "conversations",
        "conversation_style": "sharegpt",
    }


def completion_section(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "text.txt").write_text("the first line\n\nand 中文\n")
    return {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "text",
        "data_files": str(tmp_path / "text.txt"),
        "split": "train",
    }


@pytest.mark.parametrize("kind", ["alpaca", "chat", "completion", "concat_of_both"])
def test_torchtune_datasets_equal_the_float64_reference(
    encoder: TextEncoder, model: Any, tmp_path: Path, kind: str
) -> None:
    from torchtune.datasets import alpaca_dataset, chat_dataset, text_completion_dataset

    sections = {"alpaca": alpaca_section, "chat": chat_section, "completion": completion_section}
    functions = {"alpaca": alpaca_dataset, "chat": chat_dataset, "completion": text_completion_dataset}
    kinds = ["alpaca", "chat"] if kind == "concat_of_both" else [kind]
    nll = num_tokens = 0
    for name in kinds:
        arguments = {key: value for key, value in sections[name](tmp_path).items() if key != "_component_"}
        found = reference(functions[name](encoder.tokenizer, **arguments), model)
        nll, num_tokens = nll + found[0], num_tokens + found[1]
    if kind == "concat_of_both":
        source = domains(
            {
                name: {"_component_": "ppl_eval.data.sft", "dataset": sections[name](tmp_path)}
                for name in kinds
            }
        )
    else:
        source = sft(sections[kind](tmp_path))
    data = made(source, encoder, tmp_path / "cache")
    assert num_tokens > 10
    results = [ours(data, model, batch_size) for batch_size in (1, 3)]
    assert [result[1] for result in results] == [num_tokens] * 2
    for result in results:
        assert result[0] == pytest.approx(nll, rel=1e-6)
    if kind == "concat_of_both":
        assert data.domains == ("alpaca", "chat")


def test_samples_whose_labels_are_all_masked_cost_nothing_and_are_told(
    encoder: TextEncoder, model: Any, tmp_path: Path
) -> None:
    masked = ([3, 4, 5], [MASKED] * 3)
    scored = ([6, 7, 8, 9], [MASKED, 7, MASKED, 9])
    data = made(listed(masked, scored, masked), encoder, tmp_path)
    assert ours(data, model, 2)[1] == 2
    assert ours(data, model, 2)[0] == pytest.approx(
        reference(ListDataset([dict(zip(("tokens", "labels"), scored, strict=True))]), model)[0], rel=1e-6
    )
    assert any("2 samples have no token to score" in note for note in data.notes)
    with pytest.raises(ValueError, match="none of the 2 samples has a token to score: every label is -100"):
        made(listed(masked, masked), encoder, tmp_path)


def test_shifted_labels_are_found_in_the_data(encoder: TextEncoder, tmp_path: Path) -> None:
    same = [
        ([3, 4, 5, 6], [MASKED, 4, MASKED, 6]),
        ([7, 7, 7], [7, 7, 7]),
        ([8, 9], [MASKED] * 2),
    ]
    # As torchtune's main branch makes them: moved by one, the last masked.
    shifted = [([3, 4, 5, 6], [4, MASKED, 6, MASKED]), ([7, 7, 7], [7, 7, MASKED]), same[2]]
    # As others do: the last token is only a label.
    short = [([3, 4, 5], [4, MASKED, 6]), ([7, 7], [7, 7]), ([8, 9], [MASKED] * 2)]
    expected = documents(made(listed(*same), encoder, tmp_path))
    assert expected == [(list(tokens), list(labels)) for tokens, labels in same]

    def scored(found: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
        # The first label is never a target: there may or may not be one.
        return [(tokens, labels[1:]) for tokens, labels in found]

    for samples in (shifted, short):
        data = made(listed(*samples), encoder, tmp_path)
        assert scored(documents(data)) == scored(expected)
        assert any("shifted by one" in note for note in data.notes)
    # A sample that could be either goes with the first that leaves no doubt, wherever that is.
    data = made(listed(shifted[1], shifted[0]), encoder, tmp_path)
    assert scored(documents(data)) == scored([expected[1], expected[0]])


def test_labels_that_fit_neither_way_are_refused(encoder: TextEncoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample 1 of .*list_dataset: its labels are neither"):
        made(listed(([3, 4], [3, 4]), ([3, 4, 5], [9, 9, 9])), encoder, tmp_path)
    with pytest.raises(ValueError, match=r"sample 0 of .*list_dataset has 2 labels for 3 tokens"):
        made(listed(([3, 4, 5], [3, 4])), encoder, tmp_path)


@pytest.mark.parametrize("split", [False, True])
def test_packs_are_taken_apart(encoder: TextEncoder, model: Any, tmp_path: Path, split: bool) -> None:
    samples = [
        ([3, 4, 5], [MASKED, 4, 5]),
        ([6, 7, 8, 9], [6, 7, 8, 9]),
        ([10, 11], [MASKED, MASKED]),
        ([12, 13, 14, 15, 16], [MASKED, MASKED, 14, 15, 16]),
    ]
    listing = [dict(zip(("tokens", "labels"), sample, strict=True)) for sample in samples]
    section = {"_component_": PACKED, "samples": listing}
    data = made(sft({**section, "max_seq_len": 8, "split_across_pack": split}), encoder, tmp_path)
    if split:
        # The first pack takes 8 tokens: the third sample is cut after its first token, and that masked token
        # at the end of its pack cannot be told from padding. Nothing is scored in it either way.
        samples[2] = ([11], [MASKED])
    assert documents(data) == samples
    assert any("packs were taken apart" in note for note in data.notes)
    if not split:
        assert ours(data, model, 2) == pytest.approx(reference(ListDataset(listing), model), rel=1e-6)


def test_packed_alpaca_scores_what_alpaca_scores(encoder: TextEncoder, model: Any, tmp_path: Path) -> None:
    section = alpaca_section(tmp_path)
    apart = ours(made(sft(section), encoder, tmp_path / "cache"), model, 2)
    encoder.tokenizer.max_seq_len = 300
    try:
        packed = made(sft({**section, "packed": True}), encoder, tmp_path / "cache")
    finally:
        encoder.tokenizer.max_seq_len = None
    assert ours(packed, model, 2) == pytest.approx(apart, rel=1e-12)


def test_packs_without_lengths_are_cut_where_positions_start_anew(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    pack = {
        "tokens": [3, 4, 5, 6, 7, 0, 0],
        "labels": [3, 4, 5, 6, 7, -100, -100],
        "input_pos": [0, 1, 0, 1, 2, 3, 3],
    }
    data = made(sft({"_component_": LIST, "samples": [pack]}), encoder, tmp_path)
    assert [tokens[: len(labels) - labels.count(MASKED)] for tokens, labels in documents(data)] == [
        [3, 4],
        [5, 6, 7],
    ]
    # Labels shifted after packing ask for the next sample's first token: that is no target.
    crossing = {"tokens": [3, 4, 5, 6], "labels": [4, 5, 6, -100], "input_pos": [0, 1, 0, 1]}
    data = made(sft({"_component_": LIST, "samples": [crossing]}), encoder, tmp_path)
    assert documents(data) == [([3, 4], [-100, 4]), ([5, 6], [-100, 6])]
    assert any("1 labels ask for the first token of the next sample" in note for note in data.notes)


def test_truncation_is_told(encoder: TextEncoder, tmp_path: Path) -> None:
    section = completion_section(tmp_path)
    encoder.tokenizer.max_seq_len = 8
    try:
        data = made(sft(section), encoder, tmp_path / "cache")
    finally:
        encoder.tokenizer.max_seq_len = None
    assert max(np.diff(data.offsets_D1)) == 7
    assert any("samples are as long as tokenizer.max_seq_len=8" in note for note in data.notes)


@pytest.mark.parametrize("kind", [Qwen2Tokenizer, Qwen2_5Tokenizer])
@pytest.mark.parametrize("packed", [False, True])
def test_a_limit_that_cuts_nothing_masks_nothing(tmp_path: Path, kind: Any, packed: bool) -> None:
    from torchtune.datasets import alpaca_dataset

    section = alpaca_section(tmp_path)
    tokenizer = qwen2_tokenizer(tmp_path / "qwen", kind)
    plain = made(sft(section), wrap_tokenizer(tokenizer, {}), tmp_path / "cache")
    tokenizer.max_seq_len = 400
    arguments = {key: value for key, value in section.items() if key != "_component_"}
    theirs = alpaca_dataset(tokenizer, **arguments)
    data = made(sft({**section, "packed": packed}), wrap_tokenizer(tokenizer, {}), tmp_path / "cache")
    assert documents(data) == documents(plain)
    ends = [labels[-1] for _, labels in documents(data)]
    assert ends == [tokenizer.eos_id] * 4
    assert [theirs[i]["labels"][-1] for i in range(4)] == [MASKED] * 4
    assert any(
        "masks 4 labels (end tokens) of samples that tokenizer.max_seq_len=400" in n for n in data.notes
    )
    assert not any("max_seq_len" in note for note in plain.notes)


def test_a_limit_that_cuts_does_what_torchtune_does(tmp_path: Path) -> None:
    from torchtune.datasets import alpaca_dataset

    section = alpaca_section(tmp_path)
    tokenizer = qwen2_tokenizer(tmp_path / "qwen")
    whole = made(sft(section), wrap_tokenizer(tokenizer, {}), tmp_path / "cache")
    lengths = np.diff(whole.offsets_D1)
    tokenizer.max_seq_len = limit = int(np.sort(lengths)[1])
    arguments = {key: value for key, value in section.items() if key != "_component_"}
    theirs = alpaca_dataset(tokenizer, **arguments)
    data = made(sft(section), wrap_tokenizer(tokenizer, {}), tmp_path / "cache")
    for index, (cut, full) in enumerate(zip(documents(data), documents(whole), strict=True)):
        expected = (theirs[index]["tokens"], [int(label) for label in theirs[index]["labels"]])
        assert cut == (full if lengths[index] <= limit else expected)
    num_short = int((lengths <= limit).sum())
    assert any(f"masks {num_short} labels" in note for note in data.notes)


def test_hugging_face_tokenizers_do_for_text_completion_but_not_for_chats(tmp_path: Path) -> None:
    encoder = hf_encoder(tmp_path)
    data = made(sft(completion_section(tmp_path)), encoder, tmp_path / "cache")
    assert documents(data)[0][0][0] == encoder.bos_id
    with pytest.raises(ValueError, match="needs a tokenizer that knows chats"):
        made(sft(alpaca_section(tmp_path)), encoder, tmp_path / "cache")


def test_what_is_no_dataset_for_fine_tuning_is_refused(encoder: TextEncoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset section of a training config"):
        sft({"source": "json"})
    with pytest.raises(ValueError, match="cannot be built"):
        made(sft({"_component_": "torchtune.datasets.alpaca_dataset", "nonsense": 1}), encoder, tmp_path)
    section = {"_component_": LIST, "samples": [{"chosen_input_ids": [1]}]}
    with pytest.raises(ValueError, match=r"has no tokens and labels .it has: chosen_input_ids"):
        made(sft(section), encoder, tmp_path)
    with pytest.raises(ValueError, match=r"joins documents.*per_sample"):
        tokens_of(listed(([3, 4], [3, 4])), encoder, tmp_path, join="\n\n")


def test_the_cache_follows_the_content(encoder: TextEncoder, tmp_path: Path) -> None:
    first, again, other = (
        made(listed(([3, 4, last], [3, 4, last])), encoder, tmp_path, bos="never") for last in (5, 5, 6)
    )
    assert first.tokens.filename == again.tokens.filename != other.tokens.filename
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.num_bytes_D is None
    assert not list(tmp_path.glob("*.half"))
    assert any("bos=never changes nothing" in note for note in first.notes)


NOTE = "1 packs were taken apart: each sample is scored in a window of its own"


@pytest.mark.parametrize("packed_first", [False, True])
def test_notes_are_those_of_the_run_and_not_of_the_cache(
    encoder: TextEncoder, tmp_path: Path, packed_first: bool
) -> None:
    samples = [([3, 4, 5], [3, 4, 5]), ([6, 7, 8, 9], [MASKED, 7, 8, 9])]
    rows = [dict(zip(("tokens", "labels"), sample, strict=True)) for sample in samples]
    sources = {
        "packed": sft({"_component_": PACKED, "samples": rows, "max_seq_len": 8, "split_across_pack": False}),
        "apart": listed(*samples),
    }
    # Twice, so that each also finds what the other left.
    order = ["packed", "apart"] if packed_first else ["apart", "packed"]
    found = [(name, made(sources[name], encoder, tmp_path)) for name in order * 2]
    assert len({data.tokens.filename for _, data in found}) == 1
    for name, data in found:
        assert data.notes == ((NOTE,) if name == "packed" else ())
        assert documents(data) == samples


def test_a_dataset_that_draws_at_random_is_refused(encoder: TextEncoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gave other samples when it was read again.*draws at random"):
        made(sft({"_component_": "helpers.own_components.random_dataset"}), encoder, tmp_path)
    assert not list(tmp_path.glob("*/about.json"))
