"""The cache of tokens: found by content, with the notes of the run that asks and of no other."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.sources import listed, tokens_of
from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import TextSource, input_files, text_files
from ppl_eval.data.documents import Part
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.text_sources import source_of_parts
from ppl_eval.data.token_data import open_tokens, prepare_tokens
from ppl_eval.tokenization.tokenizer import TextEncoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return hf_encoder(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("bad_first", [False, True])
def test_forms_of_one_text_share_a_folder_but_not_their_notes(
    encoder: TextEncoder, tmp_path: Path, bad_first: bool
) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps({"text": "hello"}))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "hello"}) + "\n{")
    files = ["bad.jsonl", "good.jsonl"] if bad_first else ["good.jsonl", "bad.jsonl"]
    found = [
        (name, tokens_of(text_files(str(tmp_path / name), bad_lines="skip"), encoder, tmp_path / "cache"))
        for name in files * 2
    ]
    assert len({data.tokens.filename for _, data in found}) == 1
    for name, data in found:
        assert len(data.notes) == (name == "bad.jsonl")
        assert all("1 of 2 rows" in note for note in data.notes)


def test_a_run_does_not_lose_its_notes_to_one_that_comes_later(encoder: TextEncoder, tmp_path: Path) -> None:
    # A source that cannot be stamped, under the same name: the same text, with something to say and without.
    def source(*remarks: str) -> TextSource:
        def read_parts(notes: list[str]) -> Iterator[Part]:
            notes += remarks
            yield Part("hello")

        return source_of_parts("own", {}, read_parts)

    remarks = [("a remark",), (), ("two", "remarks")]
    views = [prepare_tokens(source(*some), EncodeRequest(encoder), tmp_path) for some in remarks]
    assert [open_tokens(view).notes for view in views] == remarks


def counted(path: Path, reads: list[str]) -> TextSource:
    """A file as a source that says when it is read."""
    source = text_files(str(path))

    def read_parts(notes: list[str]) -> Iterator[Part]:
        reads.append(path.read_text())
        yield from source.parts(notes)

    return replace(source, read_parts=read_parts)


def test_a_second_run_reads_nothing(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if every file had been there for long.
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    path, request, reads = tmp_path / "text.txt", EncodeRequest(encoder), list[str]()
    path.write_text("hello there")
    first = prepare_tokens(counted(path, reads), request, tmp_path / "cache")
    assert reads == ["hello there"] * 2
    assert prepare_tokens(counted(path, reads), request, tmp_path / "cache") == first
    assert reads == ["hello there"] * 2
    # Another request is not answered by what is there.
    assert prepare_tokens(counted(path, reads), replace(request, bos="always"), tmp_path / "cache") != first


def test_other_text_with_the_same_size_and_time_is_seen(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    path = tmp_path / "text.txt"
    path.write_text("hello there")
    before = path.stat()
    first = tokens_of(text_files(str(path)), encoder, tmp_path / "cache")
    path.write_text("hello where")
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert tokens_of(text_files(str(path)), encoder, tmp_path / "cache").fingerprint != first.fingerprint


def test_a_file_that_changed_just_now_is_always_hashed(encoder: TextEncoder, tmp_path: Path) -> None:
    # It may change once more within one tick of the clock of the file system, and look the same.
    path, reads = tmp_path / "text.txt", list[str]()
    path.write_text("hello there")
    for _ in range(2):
        prepare_tokens(counted(path, reads), EncodeRequest(encoder), tmp_path / "cache")
    assert len(reads) == 3


def test_a_damaged_cache_is_named(encoder: TextEncoder, tmp_path: Path) -> None:
    view = prepare_tokens(listed(["hello there"]), EncodeRequest(encoder), tmp_path)
    (array,) = tmp_path.glob("*/tokens.bin")
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tokens\.bin is not what it was.*delete"):
        open_tokens(view)
    array.unlink()
    with pytest.raises(ValueError, match=r"cannot read.*tokens\.bin"):
        open_tokens(view)
