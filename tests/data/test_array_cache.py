"""Arrays on disk, and a cache that killed and simultaneous jobs cannot spoil."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from helpers.sources import tokens_of
from helpers.texts import nasty_text
from helpers.tiny_tokenizers import hard_bpe, hf_encoder, write_folder
from ppl_eval.data import array_cache, input_files, text_files
from ppl_eval.data.array_cache import ArrayWriter, open_array
from ppl_eval.data.token_data import open_tokens

ARRAYS = ("tokens", "offsets_D1", "token_bytes", "token_words", "num_bytes_D")


def test_ids_that_do_not_fit_the_declared_vocabulary_are_refused(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "tokens.bin", np.uint16)
    writer.extend(np.array([70_000]))
    with pytest.raises(ValueError, match=r"tokens: a value of 70000\.\.70000 does not fit uint16"):
        writer.close()


def test_an_array_takes_the_values_of_others(tmp_path: Path) -> None:
    first, second, whole = (ArrayWriter(tmp_path / f"{name}.bin", np.uint16) for name in "abw")
    first.extend([1, 2])
    second.append(3)
    for writer in (first, second):
        whole.take(writer)
    whole.append(4)
    assert open_array(tmp_path, whole.close()).tolist() == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["w.bin"]


def spoilt(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0b101
    path.write_bytes(content)


@pytest.mark.parametrize("is_stamped", [False, True])
@pytest.mark.parametrize(("file", "at"), [("tokens.bin", 700), ("tokens_bytes.bin", 8), ("offsets.bin", 9)])
def test_a_damaged_cache_is_made_anew_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    file: str,
    at: int,
    is_stamped: bool,
) -> None:
    """Two bits of ``tokens.bin`` gave another perplexity."""
    if is_stamped:
        monkeypatch.setattr(input_files, "_RACY_NS", 0)
    text = tmp_path / "text.txt"
    text.write_text(nasty_text(1, 400))
    encoder = hf_encoder(tmp_path / "tokenizer")
    cache = tmp_path / "cache"
    good = {
        name: np.array(getattr(tokens_of(text_files(str(text)), encoder, cache), name)) for name in ARRAYS
    }
    (folder,) = (path for path in cache.iterdir() if (path / "tokens.bin").is_file())
    spoilt(folder / file, at)
    again = tokens_of(text_files(str(text)), encoder, cache)
    for name, expected in good.items():
        np.testing.assert_array_equal(getattr(again, name), expected)
    assert capfd.readouterr().err.count(f"{file} is damaged: the token cache is made anew") >= 1


def test_damaged_descriptions_are_made_anew(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(nasty_text(1, 100))
    encoder, cache = hf_encoder(tmp_path / "tokenizer"), tmp_path / "cache"
    good = tokens_of(text_files(str(text)), encoder, cache)
    (view,) = (cache / "views").iterdir()
    (about,) = cache.glob("*/about.json")
    for path in (view, about):
        path.write_text(path.read_text().replace("1", "2"))
        again = tokens_of(text_files(str(text)), encoder, cache)
        assert again.fingerprint == good.fingerprint
        assert again.tokens.tolist() == good.tokens.tolist()


def test_sums_are_of_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_cache, "_BLOCK_BYTES", 10)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(25)))
    sums = array_cache.block_sums(path)
    assert len(sums) == 3
    spoilt(path, 24)
    assert [a == b for a, b in zip(sums, array_cache.block_sums(path), strict=True)] == [True, True, False]


JOB = """
    import os, signal, sys
    from pathlib import Path
    from functools import partial
    from tokenizers import Tokenizer
    from ppl_eval.data import text_files, tokenize
    from ppl_eval.tokenization.encoders import Encoding, encode_hf
    from ppl_eval.tokenization.tokenizer import TextEncoder
    from ppl_eval.data.sources import EncodeRequest
    from ppl_eval.data.token_data import open_tokens, prepare_tokens

    folder, role = Path(sys.argv[1]), sys.argv[2]
    encoding = Encoding(partial(encode_hf, Tokenizer.from_file(str(folder / "tokenizer.json")), False))
    encoder = TextEncoder(encoding, str, bos_id=0, eos_id=1, adds_bos=False, vocab_size=1000, sha256="")
    write = tokenize._TextPass._write_documents

    def watched(self, chunks):
        print("writing", flush=True)
        arrays = write(self, chunks)
        if role == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "waits":
            sys.stdin.readline()
        return arrays

    tokenize._TextPass._write_documents = watched
    print("started", flush=True)
    view = prepare_tokens(text_files(str(folder / "text.txt")), EncodeRequest(encoder), folder / "cache")
    print("done", open_tokens(view).num_tokens, flush=True)
"""


def start(folder: Path, role: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(JOB), str(folder), role]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    write_folder(hard_bpe("byte_level"), tmp_path, "<|endoftext|>")
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
