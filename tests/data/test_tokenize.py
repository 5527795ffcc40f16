"""Text to tokens: the ids of one call, in flat memory, with the figures of the text."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.sources import listed, tokens_of
from helpers.texts import nasty_text
from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import TextSource, text_files, tokenize
from ppl_eval.data.documents import Part
from ppl_eval.data.text_sources import source_of_parts
from ppl_eval.tokenization import chunking, workers
from ppl_eval.tokenization.tokenizer import TextEncoder
from ppl_eval.tokenization.word_count import count_words

DOCUMENTS = [nasty_text(seed, 60) for seed in range(9)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return hf_encoder(tmp_path_factory.mktemp("tokenizer"))


def test_documents_on_their_own(encoder: TextEncoder, tmp_path: Path) -> None:
    data = tokens_of(listed(["", *DOCUMENTS, ""]), encoder, tmp_path, bos="always")
    assert data.num_documents == len(DOCUMENTS)
    for d, text in enumerate(DOCUMENTS):
        found = data.tokens[data.offsets_D1[d] : data.offsets_D1[d + 1]]
        assert found.tolist() == [encoder.bos_id, *encoder.encode(text).tolist()]
    assert data.num_bytes_D.tolist() == [len(text.encode()) for text in DOCUMENTS]
    assert data.num_words_D.tolist() == [count_words(text) for text in DOCUMENTS]
    assert data.domains == ("all",)
    assert data.domain_D is None
    assert isinstance(data.tokens, np.memmap)
    assert any("2 of 11 documents are empty" in note for note in data.notes)


def test_joined_documents_are_one_call(encoder: TextEncoder, tmp_path: Path) -> None:
    data = tokens_of(listed(DOCUMENTS), encoder, tmp_path, "\n\n")
    assert data.tokens.tolist() == encoder.encode("\n\n".join(DOCUMENTS)).tolist()
    assert data.offsets_D1.tolist() == [0, len(data.tokens)]
    # What is scored is what is counted: with the joins.
    assert data.num_bytes_D.tolist() == [len("\n\n".join(DOCUMENTS).encode())]
    assert data.num_words_D.tolist() == [count_words("\n\n".join(DOCUMENTS))]
    assert data.num_documents == len(DOCUMENTS)


def test_empty_documents_are_joined_too(encoder: TextEncoder, tmp_path: Path) -> None:
    # As the scripts do that the published tables come from; one cache, so that the two must not be taken for
    # each other.
    for texts in (["one", "", "two"], ["one", "two"], ["", "one", "two"]):
        data = tokens_of(listed(texts), encoder, tmp_path, "\n\n")
        assert data.tokens.tolist() == encoder.encode("\n\n".join(texts)).tolist()


def test_joins_stay_inside_a_domain(encoder: TextEncoder, tmp_path: Path) -> None:
    def read_parts(notes: list[str]) -> Iterator[Part]:
        for i, text in enumerate(DOCUMENTS):
            yield Part(text, domain="even" if i % 2 == 0 else "odd")

    source = source_of_parts("mixed", {}, read_parts)
    joined = tokens_of(source, encoder, tmp_path, "\n\n")
    streams = ["\n\n".join(DOCUMENTS[0::2]), "\n\n".join(DOCUMENTS[1::2])]
    assert joined.tokens.tolist() == [token for text in streams for token in encoder.encode(text).tolist()]
    assert joined.domains == ("even", "odd")
    assert joined.domain_D.tolist() == [0, 1]
    assert joined.num_bytes_D.tolist() == [len(text.encode()) for text in streams]
    apart = tokens_of(source, encoder, tmp_path)
    assert apart.domain_D.tolist() == [i % 2 for i in range(len(DOCUMENTS))]
    # The same text without domains is other data: its totals agree, its domains do not.
    assert apart.fingerprint != tokens_of(listed(DOCUMENTS), encoder, tmp_path).fingerprint


@pytest.mark.parametrize("join", [None, "\n\n"])
def test_in_parallel_and_in_chunks_the_same_bits(
    encoder: TextEncoder, tmp_path: Path, join: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*DOCUMENTS, nasty_text(77, 3000), *DOCUMENTS]
    whole = tokens_of(listed(texts), encoder, tmp_path / "whole", join)

    def small_cut(parts, encoding):  # type: ignore[no-untyped-def]
        return chunking.cut(parts, encoding, 500)

    def two_workers(encode, groups, measure):  # type: ignore[no-untyped-def]
        return workers.encode_groups(encode, groups, num_workers=2, measure=measure)

    monkeypatch.setattr(tokenize, "cut", small_cut)
    monkeypatch.setattr(tokenize, "group", lambda made: chunking.group(made, 500))
    monkeypatch.setattr(tokenize, "encode_groups", two_workers)
    cut = tokens_of(listed(texts), encoder, tmp_path / "cut", join)
    for name in ("tokens", "offsets_D1", "num_bytes_D", "num_words_D", "token_bytes", "token_words"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
    assert cut.fingerprint == whole.fingerprint


def test_chunks_that_do_not_fit_lead_to_one_call(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 3 * chunking.CHUNK_CHARS
    tried: list[str | None] = []

    def checked(encoded):  # type: ignore[no-untyped-def]
        for chunk in encoded:
            if not chunk.is_first:
                raise chunking.SeamError
            yield chunk

    def cut(parts, encoding):  # type: ignore[no-untyped-def]
        tried.append(encoding.one_call)
        return chunking.cut(parts, encoding)

    monkeypatch.setattr(tokenize, "checked", checked)
    monkeypatch.setattr(tokenize, "cut", cut)
    data = tokens_of(listed([text]), encoder, tmp_path)
    assert tried == [None, "its chunks did not fit together"]
    assert data.num_tokens == len(encoder.encode(text))
    assert any("one call" in note for note in data.notes)


def test_crlf_and_byte_order_marks_are_reported_and_kept(encoder: TextEncoder, tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\r\n"
    data = tokens_of(listed([text, "three\n"]), encoder, tmp_path)
    assert data.tokens[: data.offsets_D1[1]].tolist() == encoder.encode(text).tolist()
    assert any("1 of 2 documents have CRLF" in note for note in data.notes)
    assert any("byte order mark" in note for note in data.notes)
    assert (
        data.fingerprint
        != tokens_of(listed([text.replace("\r\n", "\n"), "three\n"]), encoder, tmp_path).fingerprint
    )


def test_no_text_is_an_error(encoder: TextEncoder, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="has no text: 1 documents, all of them empty"):
        tokens_of(text_files(str(tmp_path / "empty.txt")), encoder, tmp_path)


def test_text_that_changes_between_the_passes_is_caught(encoder: TextEncoder, tmp_path: Path) -> None:
    versions = iter([["one"], ["two"]])
    source = TextSource("changing", {}, lambda: iter(next(versions)))
    with pytest.raises(ValueError, match="changed while it was read"):
        tokens_of(source, encoder, tmp_path)
