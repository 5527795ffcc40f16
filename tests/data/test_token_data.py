"""Token files: the right ids in flat memory, and a cache that killed and simultaneous jobs cannot spoil."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from helpers.data_helpers import hf_config, hf_encoder, nasty_text, train
from ppl_eval.data import TextSource, text_files
from ppl_eval.data import array_store as stores
from ppl_eval.data import token_data as tokens
from ppl_eval.data import tokenize as text_tokens
from ppl_eval.data.sources import Part, source_of_parts
from ppl_eval.data.token_data import TokenData, open_tokens, prepare_tokens
from ppl_eval.tokenization import chunking as pieces
from ppl_eval.tokenization import workers
from ppl_eval.tokenization.tokenizer import TextEncoder

DOCUMENTS = [nasty_text(seed, 60) for seed in range(9)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return hf_encoder(tmp_path_factory.mktemp("tokenizer"))


def listed(texts: list[str]) -> TextSource:
    return TextSource("listed", {}, lambda: iter(texts))


def made(
    source: TextSource, encoder: TextEncoder, join: str | None, cache: Path, bos: str = "never"
) -> TokenData:
    return open_tokens(prepare_tokens(source, encoder, join, bos, cache))


def test_documents_on_their_own(encoder: TextEncoder, tmp_path: Path) -> None:
    data = made(listed(["", *DOCUMENTS, ""]), encoder, None, tmp_path, bos="always")
    assert data.num_documents == len(DOCUMENTS)
    for d, text in enumerate(DOCUMENTS):
        found = data.tokens[data.offsets_D1[d] : data.offsets_D1[d + 1]]
        assert found.tolist() == [encoder.bos_id, *encoder.encode(text).tolist()]
    assert data.num_bytes_D.tolist() == [len(text.encode()) for text in DOCUMENTS]
    assert data.num_words_D.tolist() == [tokens.count_words(text) for text in DOCUMENTS]
    assert data.domains == ("all",)
    assert data.domain_D is None
    assert isinstance(data.tokens, np.memmap)
    assert any("2 of 11 documents are empty" in note for note in data.notes)


def test_joined_documents_are_one_call(encoder: TextEncoder, tmp_path: Path) -> None:
    data = made(listed(DOCUMENTS), encoder, "\n\n", tmp_path)
    assert data.tokens.tolist() == encoder.encode("\n\n".join(DOCUMENTS)).tolist()
    assert data.offsets_D1.tolist() == [0, len(data.tokens)]
    # Of the original text: the joins are not in it.
    assert data.num_bytes_D.tolist() == [sum(len(text.encode()) for text in DOCUMENTS)]
    assert data.num_documents == len(DOCUMENTS)


def test_empty_documents_are_joined_too(encoder: TextEncoder, tmp_path: Path) -> None:
    # As the scripts do that the published tables come from; one cache, so that the two must not be taken for
    # each other.
    for texts in (["one", "", "two"], ["one", "two"], ["", "one", "two"]):
        data = made(listed(texts), encoder, "\n\n", tmp_path)
        assert data.tokens.tolist() == encoder.encode("\n\n".join(texts)).tolist()


def test_joins_stay_inside_a_domain(encoder: TextEncoder, tmp_path: Path) -> None:
    def read_parts(notes: list[str]) -> Iterator[Part]:
        for i, text in enumerate(DOCUMENTS):
            yield Part(text, domain="even" if i % 2 == 0 else "odd")

    source = source_of_parts("mixed", {}, read_parts)
    joined = made(source, encoder, "\n\n", tmp_path)
    streams = ["\n\n".join(DOCUMENTS[0::2]), "\n\n".join(DOCUMENTS[1::2])]
    assert joined.tokens.tolist() == [token for text in streams for token in encoder.encode(text).tolist()]
    assert joined.domains == ("even", "odd")
    assert joined.domain_D.tolist() == [0, 1]
    assert joined.num_bytes_D.tolist() == [sum(len(t.encode()) for t in DOCUMENTS[i::2]) for i in (0, 1)]
    apart = made(source, encoder, None, tmp_path)
    assert apart.domain_D.tolist() == [i % 2 for i in range(len(DOCUMENTS))]
    # The same text without domains is other data: its totals agree, its domains do not.
    assert apart.fingerprint != made(listed(DOCUMENTS), encoder, None, tmp_path).fingerprint


@pytest.mark.parametrize("join", [None, "\n\n"])
def test_in_parallel_and_in_pieces_the_same_bits(
    encoder: TextEncoder, tmp_path: Path, join: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*DOCUMENTS, nasty_text(77, 3000), *DOCUMENTS]
    whole = made(listed(texts), encoder, join, tmp_path / "whole")

    def small_cut(parts, encoding):  # type: ignore[no-untyped-def]
        return pieces.cut(parts, encoding, 500)

    def two_workers(encode, groups):  # type: ignore[no-untyped-def]
        return workers.encode_groups(encode, groups, num_workers=2)

    monkeypatch.setattr(text_tokens, "cut", small_cut)
    monkeypatch.setattr(text_tokens, "group", lambda made: pieces.group(made, 500))
    monkeypatch.setattr(text_tokens, "encode_groups", two_workers)
    cut = made(listed(texts), encoder, join, tmp_path / "cut")
    for name in ("tokens", "offsets_D1", "num_bytes_D", "num_words_D"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(whole, name))
    assert cut.fingerprint == whole.fingerprint


def test_pieces_that_do_not_fit_lead_to_one_call(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "word " * 3 * pieces.PIECE_CHARS
    tried: list[str | None] = []

    def checked(encoded):  # type: ignore[no-untyped-def]
        for piece in encoded:
            if not piece.is_first:
                raise pieces.SeamError
            yield piece

    def cut(parts, encoding):  # type: ignore[no-untyped-def]
        tried.append(encoding.one_call)
        return pieces.cut(parts, encoding)

    monkeypatch.setattr(text_tokens, "checked", checked)
    monkeypatch.setattr(text_tokens, "cut", cut)
    data = made(listed([text]), encoder, None, tmp_path)
    assert tried == [None, "its pieces did not fit together"]
    assert data.num_tokens == len(encoder.encode(text))
    assert any("one call" in note for note in data.notes)


def test_ids_that_do_not_fit_the_declared_vocabulary_are_refused(tmp_path: Path) -> None:
    writer = stores.ArrayWriter(tmp_path / "tokens.bin", np.uint16)
    writer.extend(np.array([70_000]))
    with pytest.raises(ValueError, match=r"tokens: a value of 70000\.\.70000 does not fit uint16"):
        writer.close()


def test_crlf_and_byte_order_marks_are_reported_and_kept(encoder: TextEncoder, tmp_path: Path) -> None:
    text = "\ufeffone\r\ntwo\r\n"
    data = made(listed([text, "three\n"]), encoder, None, tmp_path)
    assert data.tokens[: data.offsets_D1[1]].tolist() == encoder.encode(text).tolist()
    assert any("1 of 2 documents have CRLF" in note for note in data.notes)
    assert any("byte order mark" in note for note in data.notes)
    assert (
        data.fingerprint
        != made(listed([text.replace("\r\n", "\n"), "three\n"]), encoder, None, tmp_path).fingerprint
    )


def test_no_text_is_an_error(encoder: TextEncoder, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="has no text: 1 documents, all of them empty"):
        prepare_tokens(text_files(str(tmp_path / "empty.txt")), encoder, None, "never", tmp_path)
    with pytest.raises(ValueError, match="no source"):
        prepare_tokens(["text"], encoder, None, "never", tmp_path)


def test_forms_of_one_text_share_a_folder_but_not_their_notes(encoder: TextEncoder, tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps({"text": "hello"}))
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "hello"}) + "\n{")
    good = text_files(str(tmp_path / "good.jsonl"))
    bad = text_files(str(tmp_path / "bad.jsonl"), bad_lines="skip")
    clean, noted = (made(source, encoder, None, tmp_path / "cache") for source in (good, bad))
    assert clean.tokens.filename == noted.tokens.filename
    assert clean.notes == ()
    assert "1 of 2 rows" in noted.notes[0]


def test_a_second_run_reads_nothing(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("hello there")
    long_ago = 10**18
    os.utime(path, ns=(long_ago, long_ago))
    first = prepare_tokens(text_files(str(path)), encoder, None, "never", tmp_path / "cache")
    reads: list[str] = []
    monkeypatch.setattr(
        tokens, "digest_of", lambda source: reads.append(source.name) or text_tokens.digest_of(source)
    )
    assert prepare_tokens(text_files(str(path)), encoder, None, "never", tmp_path / "cache") == first
    assert reads == []
    # Other text under the same name, length and all: seen by its time of change.
    path.write_text("hello where")
    os.utime(path, ns=(long_ago, long_ago + 1))
    other = prepare_tokens(text_files(str(path)), encoder, None, "never", tmp_path / "cache")
    assert open_tokens(other).fingerprint != open_tokens(first).fingerprint
    assert reads == ["text_files"]


def test_a_file_that_changed_just_now_is_always_hashed(encoder: TextEncoder, tmp_path: Path) -> None:
    # Twice within one tick of the clock of the file system: size and time of change are the same.
    path = tmp_path / "text.txt"
    path.write_text("hello there")
    stat = path.stat()
    first = made(text_files(str(path)), encoder, None, tmp_path / "cache")
    path.write_text("hello where")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert made(text_files(str(path)), encoder, None, tmp_path / "cache").fingerprint != first.fingerprint


def test_text_that_changes_between_the_passes_is_caught(encoder: TextEncoder, tmp_path: Path) -> None:
    versions = iter([["one"], ["two"]])
    source = TextSource("changing", {}, lambda: iter(next(versions)))
    with pytest.raises(ValueError, match="changed while it was read"):
        prepare_tokens(source, encoder, None, "never", tmp_path)


def test_a_damaged_cache_is_told(encoder: TextEncoder, tmp_path: Path) -> None:
    view = prepare_tokens(listed(["hello there"]), encoder, None, "never", tmp_path)
    (array,) = tmp_path.glob("*/tokens.bin")
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tokens\.bin is not what it was.*delete"):
        open_tokens(view)
    array.unlink()
    with pytest.raises(ValueError, match=r"cannot read.*tokens\.bin"):
        open_tokens(view)


JOB = """
    import os, signal, sys
    from pathlib import Path
    from functools import partial
    from tokenizers import Tokenizer
    from ppl_eval.data import tokenize as text_tokens
    from ppl_eval.data import text_files
    from ppl_eval.tokenization.encoders import Encoding, encode_hf
    from ppl_eval.tokenization.tokenizer import TextEncoder
    from ppl_eval.data.token_data import open_tokens, prepare_tokens

    folder, role = Path(sys.argv[1]), sys.argv[2]
    encoding = Encoding(partial(encode_hf, Tokenizer.from_file(str(folder / "tokenizer.json"))))
    encoder = TextEncoder(encoding, str, bos_id=0, eos_id=1, adds_bos=False, vocab_size=1000, sha256="")
    write = text_tokens._Writing._write_tokens

    def watched(self, encoding):
        print("writing", flush=True)
        arrays = write(self, encoding)
        if role == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "waits":
            sys.stdin.readline()
        return arrays

    text_tokens._Writing._write_tokens = watched
    print("started", flush=True)
    view = prepare_tokens(text_files(str(folder / "text.txt")), encoder, None, "never", folder / "cache")
    print("done", open_tokens(view).num_tokens, flush=True)
"""


def start(folder: Path, role: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(JOB), str(folder), role]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    hf_config(train("byte_level"), tmp_path)
    (tmp_path / "text.txt").write_text(nasty_text(3))
    return tmp_path


def test_two_jobs_that_start_together_write_once(job_folder: Path) -> None:
    with start(job_folder, "waits") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "started\n"
        assert first.stdout.readline() == "writing\n"
        # The first holds the lock in the middle of its work; the second comes, and must wait for it.
        with start(job_folder, "goes") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "started\n"
            first_words, _ = first.communicate("go on\n")
            second_words, _ = second.communicate()
    assert first_words == second_words != ""
    assert "writing" not in second_words
    assert len(list((job_folder / "cache").glob("*/tokens.bin"))) == 1


def test_a_killed_job_leaves_nothing_that_is_used(job_folder: Path) -> None:
    with start(job_folder, "dies") as killed:
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    (half,) = (job_folder / "cache").glob("*.half")
    assert (half / "tokens.bin").is_file()
    with start(job_folder, "goes") as again:
        words, _ = again.communicate()
    assert again.returncode == 0
    assert "writing" in words
    assert not list((job_folder / "cache").glob("*.half"))
    data = open_tokens(next((job_folder / "cache" / "views").glob("*.json")))
    assert data.tokens.tolist() == hf_encoder(job_folder).encode(nasty_text(3)).tolist()
