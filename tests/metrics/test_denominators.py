"""Bytes and words of the text that windows cover: counted on the text, whole however windows are divided."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from helpers.sources import listed, tokens_of
from helpers.texts import nasty_text
from helpers.tiny_tokenizers import byte_level_bpe, hard_bpe, hf_encoder, wrapped
from ppl_eval import protocols
from ppl_eval.data.token_data import TokenData
from ppl_eval.metrics.denominators import covered_text, sums_between, window_sizes
from ppl_eval.protocols.plan import Plan, make_plan
from ppl_eval.tokenization.tokenizer import TextEncoder
from ppl_eval.tokenization.word_count import count_words

CHINESE = ["漢字仮名交じり文、三百文字。" * (1 + n % 4) + "的" * n for n in range(60)]


def sizes_of_all(plan: Plan, data: TokenData) -> tuple[int, int]:
    covered = covered_text(plan, data)
    assert covered is not None
    return int(covered.num_bytes_D.sum()), int(covered.num_words_D.sum())


def text_of(encoder: TextEncoder, text: str, num_tokens: int) -> str:
    """The text of the first tokens, by the tokenizer's own offsets; they must not end inside a character."""
    tokenizer = encoder.tokenizer.tokenizer
    return text[: tokenizer.encode(text, add_special_tokens=False).offsets[num_tokens - 1][1]]


def test_special_tokens_in_a_text_have_their_bytes(smollm2: Path, tmp_path: Path) -> None:
    """ChatML: decoding skips these tokens, and 741 bytes were reported where 1,017 are right."""
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    from ppl_eval.tokenization.tokenizer import wrap_tokenizer

    section = {
        "tokenizer_json_path": str(smollm2 / "tokenizer.json"),
        "tokenizer_config_json_path": str(smollm2 / "tokenizer_config.json"),
    }
    encoder = wrap_tokenizer(HuggingFaceBaseTokenizer(**section), section)
    chats = [
        f"<|im_start|>user\nQuestion {n}?<|im_end|>\n<|im_start|>assistant\nAnswer {n}.<|im_end|>\n"
        for n in range(40)
    ]
    text = "".join(chats)
    data = tokens_of(listed([text]), encoder, tmp_path)
    for num_windows in (1, 3, 7):
        plan = make_plan(protocols.disjoint(64), data.offsets_D1, 1, num_windows)
        covered = text_of(encoder, text, 64 * num_windows)
        assert "<|im_end|>" in covered
        assert sizes_of_all(plan, data) == (len(covered.encode()), count_words(covered))


@pytest.mark.parametrize("join", ["\n\n", "", " | "])
def test_joins_are_scored_and_counted(tmp_path: Path, join: str) -> None:
    encoder = hf_encoder(tmp_path / "tokenizer")
    documents = [f"line {n}: {'word ' * (n % 7)}end" for n in range(250)]
    whole = join.join(documents)
    data = tokens_of(listed(documents), encoder, tmp_path / "cache", join)
    for num_windows in (1, 29, 33, 62, None):
        plan = make_plan(protocols.disjoint(32, join=join, keep_tail=True), data.offsets_D1, 1, num_windows)
        covered = whole if plan.is_whole else text_of(encoder, whole, 32 * plan.num_windows)
        assert sizes_of_all(plan, data) == (len(covered.encode()), count_words(covered))


@pytest.mark.parametrize("max_seq_len", [5, 16, 64])
def test_a_cut_inside_a_character_counts_the_bytes_before_it(tmp_path: Path, max_seq_len: int) -> None:
    """A token of a byte-level tokenizer may be a part of a character; decoding would make 3 bytes of each."""
    tokenizer = byte_level_bpe("only latin letters here", 300)
    encoder = wrapped(tokenizer, tmp_path / "tokenizer")
    data = tokens_of(listed(CHINESE), encoder, tmp_path / "cache")
    plan = make_plan(protocols.disjoint(max_seq_len, join=None), data.offsets_D1, 1)
    # Every token of this text is one byte.
    assert all(len(text.encode()) == length for text, length in zip(CHINESE, plan.length_D, strict=True))
    covered = covered_text(plan, data)
    assert covered is not None
    assert covered.num_bytes_D.tolist() == [
        n - n % max_seq_len for n in plan.length_D[: len(covered.num_bytes_D)]
    ]


def test_a_document_that_is_cut_counts_less_than_its_original(tmp_path: Path) -> None:
    encoder = hf_encoder(tmp_path / "tokenizer")
    text = "alpha beta gamma delta " * 30
    data = tokens_of(listed([text, text]), encoder, tmp_path / "cache")
    plan = make_plan(protocols.rolling(16), data.offsets_D1, 1, max_windows=3)
    covered = text_of(encoder, text, 48)
    assert sizes_of_all(plan, data) == (len(covered.encode()), count_words(covered))
    assert covered_text(plan, data).of == "original documents; of one that is cut the tokenised text"
    whole = make_plan(protocols.rolling(16), data.offsets_D1, 1)
    assert sizes_of_all(whole, data) == (2 * len(text), 2 * count_words(text))
    assert covered_text(whole, data).of == "original documents"


KINDS = ("byte_level", "byte_level_prefix_space", "split_digits_in_threes", "metaspace", "special")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextEncoder]:
    made = {}
    for kind in KINDS:
        tokenizer = hard_bpe("byte_level" if kind == "special" else kind)
        if kind == "special":
            tokenizer.add_special_tokens([AddedToken("the", normalized=False)])
        made[kind] = wrapped(tokenizer, tmp_path_factory.mktemp(kind), "<|endoftext|>")
    return made


PROTOCOLS = {
    "disjoint": lambda: protocols.disjoint(7, join="\n\n", keep_tail=True),
    "alone": lambda: protocols.disjoint(6, join=None),
    "strided": lambda: protocols.strided(9, 4, join=" "),
    "rolling": lambda: protocols.rolling(5, context_len=2),
    "megatron": lambda: protocols.megatron(8, 3, join=""),
    "per_sample": lambda: protocols.per_sample(6, too_long="window"),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    protocol=st.sampled_from(sorted(PROTOCOLS)),
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 1_000), max_size=6),
)
def test_any_partition_of_the_windows_adds_up(
    encoders: dict[str, TextEncoder],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    protocol: str,
    seed: int,
    cuts: list[int],
) -> None:
    texts = [nasty_text(seed + n, 25) for n in range(3)]
    chosen = PROTOCOLS[protocol]()
    cache = tmp_path_factory.mktemp("cache")
    data = tokens_of(listed(texts), encoders[kind], cache, chosen.join, word_separator=chosen.word_separator)
    plan = make_plan(chosen, data.offsets_D1, 1)
    bounds = sorted({0, plan.num_windows, *(cut % (plan.num_windows + 1) for cut in cuts)})
    parts = [window_sizes(plan, data, a, b) for a, b in itertools.pairwise(bounds)]
    assert sum(int(part[0].sum()) for part in parts) == sizes_of_all(plan, data)[0]
    assert sum(int(part[1].sum()) for part in parts) == sizes_of_all(plan, data)[1]
    # The whole text, where its end is scored.
    last = plan.protocol.locate(plan.length_D, plan.windows_per_document() - 1)[2]
    if (last == plan.length_D).all():
        whole = [chosen.join.join(texts)] if chosen.join is not None else texts
        separator = chosen.word_separator
        assert sizes_of_all(plan, data) == (
            sum(len(text.encode()) for text in whole),
            sum(count_words(text, separator) for text in whole),
        )
        by_token = sums_between(data.token_bytes, data.offsets_D1[:-1], data.offsets_D1[1:])
        assert by_token.tolist() == [len(text.encode()) for text in whole]
        words = 1 + sums_between(data.token_words, data.offsets_D1[:-1], data.offsets_D1[1:])
        assert words.tolist() == [count_words(text, separator) for text in whole]


def test_sums_of_runs_longer_and_shorter_than_what_is_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppl_eval.metrics import denominators

    monkeypatch.setattr(denominators, "_CHUNK", 10)
    values = np.arange(100, dtype=np.uint32)
    begin, end = np.array([0, 3, 40, 95, 99]), np.array([3, 37, 44, 99, 100])
    expected = [int(values[a:b].sum()) for a, b in zip(begin, end, strict=True)]
    assert sums_between(values, begin, end).tolist() == expected
    assert sums_between(values, begin[:0], end[:0]).tolist() == []
