"""Token files of nanoGPT and Megatron: mapped, not copied, and no id is believed."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import os
import struct
from pathlib import Path

import datasets
import numpy as np
import pytest
import safetensors.numpy
import zstandard

from helpers.sources import tokens_of
from helpers.tiny_tokenizers import hf_encoder
from helpers.token_files import IDS, SEPARATOR, write_bin, write_llm_c, write_megatron
from ppl_eval.data import domains, input_files, token_files
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import open_tokens, prepare_tokens
from ppl_eval.protocols import disjoint
from ppl_eval.protocols.plan import make_plan
from ppl_eval.tokenization.tokenizer import TextEncoder

ENDS = [0, 4, 6, 11, 13]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return hf_encoder(tmp_path_factory.mktemp("tokenizer"))


def test_a_file_is_mapped_where_it_lies(encoder: TextEncoder, tmp_path: Path) -> None:
    path = write_bin(tmp_path / "val.bin")
    data = tokens_of(token_files(path), encoder, tmp_path / "cache")
    assert isinstance(data.tokens, np.memmap)
    assert data.tokens.filename == Path(path)
    assert data.tokens.tolist() == IDS.tolist()
    assert data.offsets_D1.tolist() == [0, len(IDS)]
    assert data.num_bytes_D is None
    assert data.num_words_D is None
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


@pytest.mark.parametrize("separator", [SEPARATOR, "eos"])
def test_a_separator_ends_documents_and_stays_in_them(
    encoder: TextEncoder, tmp_path: Path, separator: int | str
) -> None:
    source = token_files(write_bin(tmp_path / "val.bin"), separator=separator)
    data = tokens_of(source, encoder, tmp_path / "cache")
    assert data.offsets_D1.tolist() == ENDS
    assert data.num_documents == 4
    joined = tokens_of(source, encoder, tmp_path / "cache", join="\n\n")
    assert joined.offsets_D1.tolist() == [0, len(IDS)]
    assert joined.num_documents == 4


@pytest.mark.parametrize("code", [4, 8])
def test_megatron_index(encoder: TextEncoder, tmp_path: Path, code: int) -> None:
    # Five sequences in three documents: a document may have several sequences.
    path = write_megatron(tmp_path / "val.bin", IDS, [4, 2, 3, 2, 2], [0, 1, 4, 5], code)
    data = tokens_of(token_files(path), encoder, tmp_path / "cache")
    assert data.tokens.tolist() == IDS.tolist()
    assert data.offsets_D1.tolist() == [0, 4, 11, 13]
    assert data.tokens.filename == Path(path)


def test_the_fingerprint_does_not_see_the_form(encoder: TextEncoder, tmp_path: Path) -> None:
    forms = [
        token_files(write_bin(tmp_path / "a.bin"), separator=1),
        token_files(write_bin(tmp_path / "b.bin", dtype="uint32"), dtype="uint32", separator=1),
        token_files(write_megatron(tmp_path / "c.bin", IDS, [4, 2, 5, 2], [0, 1, 2, 3, 4])),
    ]
    first, *others = (tokens_of(source, encoder, tmp_path / "cache").fingerprint for source in forms)
    assert all(other == first for other in others)
    one_document = tokens_of(
        token_files(write_bin(tmp_path / "a.bin")), encoder, tmp_path / "cache"
    ).fingerprint
    assert one_document != first
    other_ids = tokens_of(
        token_files(write_bin(tmp_path / "d.bin", IDS[::-1]), separator=1), encoder, tmp_path / "cache"
    ).fingerprint
    assert other_ids["tokens_sha256"] != first["tokens_sha256"]


def test_several_files_and_domains(encoder: TextEncoder, tmp_path: Path) -> None:
    paths = [write_bin(tmp_path / f"{name}.bin", ids) for name, ids in (("a", IDS), ("b", IDS[:6]))]
    data = tokens_of(token_files(paths, separator=1), encoder, tmp_path / "cache")
    assert data.tokens.tolist() == [*IDS, *IDS[:6]]
    assert data.offsets_D1.tolist() == [*ENDS, 17, 19]
    assert any("2 token files were copied" in note for note in data.notes)
    section = {"_component_": "ppl_eval.data.token_files", "separator": 1}
    source = domains({"x": {**section, "paths": paths[0]}, "y": {**section, "paths": paths[1]}})
    both = tokens_of(source, encoder, tmp_path / "cache", join="")
    assert both.domains == ("x", "y")
    assert both.offsets_D1.tolist() == [0, 13, 19]
    assert both.domain_D.tolist() == [0, 1]
    with pytest.raises(ValueError, match="same dtype and separator"):
        domains({"x": {**section, "paths": paths[0]}, "y": {**section, "paths": paths[1], "separator": 2}})


def test_ids_outside_the_vocabulary_are_found(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppl_eval.data import token_sources as module

    monkeypatch.setattr(module, "_BLOCK", 4)
    bad = IDS.copy()
    bad[9] = encoder.vocab_size
    with pytest.raises(
        ValueError, match=rf"v\.bin holds the id {encoder.vocab_size} at position 9.*vocabulary of"
    ):
        tokens_of(token_files(write_bin(tmp_path / "v.bin", bad)), encoder, tmp_path / "cache")
    bad[9] = -3
    with pytest.raises(ValueError, match="id -3 at position 9"):
        tokens_of(
            token_files(write_bin(tmp_path / "v.bin", bad, "int32"), dtype="int32"),
            encoder,
            tmp_path / "cache",
        )
    # The last id of all is inside.
    bad[9] = encoder.vocab_size - 1
    tokens_of(token_files(write_bin(tmp_path / "v.bin", bad)), encoder, tmp_path / "cache")
    # Blocks of any size find the same documents.
    assert (
        tokens_of(
            token_files(write_bin(tmp_path / "w.bin"), separator=1), encoder, tmp_path / "cache"
        ).offsets_D1.tolist()
        == ENDS
    )


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda bin_, idx: idx.write_bytes(b"something else" * 9), "no Megatron index"),
        (lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:40]), "cut off"),
        (lambda bin_, idx: bin_.write_bytes(bin_.read_bytes()[:-2]), "says 13 ids"),
        (
            lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:-8] + struct.pack("<q", 2)),
            "do not run from 0 to 3",
        ),
        (
            lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:17] + b"\x07" + idx.read_bytes()[18:]),
            "type code 7",
        ),
        (lambda bin_, idx: write_megatron(bin_, IDS, [5, -2, 10], [0, 1, 2, 3]), "a sequence of -2 ids"),
        (lambda bin_, idx: write_megatron(bin_, IDS, [4, 7, 2], [0, 2, 1, 3]), "do not run from 0 to 3"),
        (lambda bin_, idx: write_megatron(bin_, IDS, [4, 7, 2], [0, 9, 3]), "do not run from 0 to 3"),
        (
            # The difference between these two overflows to 1.
            lambda bin_, idx: write_megatron(bin_, IDS, [4, 7, 2], [0, 2**63 - 1, -(2**63), -1, 3]),
            "do not run from 0 to 3",
        ),
        (lambda bin_, idx: write_megatron(bin_, IDS, [4, 7, 2], []), "do not run from 0 to 3"),
        (
            lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:34] + b"\0" * 12 + idx.read_bytes()[46:]),
            "do not lie back to back",
        ),
        (lambda bin_, idx: idx.write_bytes(idx.read_bytes() + b"12345"), "cut off or damaged"),
        (lambda bin_, idx: idx.write_bytes(idx.read_bytes() + b"\0\1\0"), "that are not text"),
        (
            lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:18] + b"\xff" * 16 + idx.read_bytes()[34:]),
            "cut off",
        ),
        (lambda bin_, idx: (idx.unlink(), bin_.write_bytes(b"odd")), "no whole number of uint16"),
        (lambda bin_, idx: (idx.unlink(), bin_.write_bytes(b"")), "is empty"),
    ],
)
def test_damaged_files_are_named(encoder: TextEncoder, tmp_path: Path, damage, told: str) -> None:  # type: ignore[no-untyped-def]
    path = write_megatron(tmp_path / "val.bin", IDS, [4, 7, 2], [0, 1, 2, 3])
    damage(Path(path), Path(path).with_suffix(".idx"))
    with pytest.raises(ValueError, match=told):
        tokens_of(token_files(path), encoder, tmp_path / "cache")


def test_arguments_are_checked(encoder: TextEncoder, tmp_path: Path) -> None:
    path = write_bin(tmp_path / "val.bin")
    with pytest.raises(ValueError, match="dtype is 'float32'; allowed: uint16"):
        token_files(path, dtype="float32")
    with pytest.raises(ValueError, match="separator is -1"):
        token_files(path, separator=-1)
    with pytest.raises(ValueError, match="does not hold the separator 600 even once"):
        tokens_of(token_files(path, separator=600), encoder, tmp_path / "cache")


def test_bos_is_what_the_file_has(encoder: TextEncoder, tmp_path: Path) -> None:
    source = token_files(write_bin(tmp_path / "val.bin"), separator=1)
    with pytest.raises(ValueError, match="bos is 'always', but only 0 of 4 documents"):
        tokens_of(source, encoder, tmp_path / "cache", bos="always")
    assert any(
        "0 of 4 documents begin" in note
        for note in tokens_of(source, encoder, tmp_path / "cache", bos="tokenizer").notes
    )
    with_bos = np.where(IDS == SEPARATOR, SEPARATOR, IDS)
    with_bos[[0, 4, 6, 11]] = encoder.bos_id
    tokens_of(
        token_files(write_bin(tmp_path / "bos.bin", with_bos), separator=1),
        encoder,
        tmp_path / "cache",
        bos="always",
    )


def test_a_file_that_changes_after_it_was_mapped_is_refused(encoder: TextEncoder, tmp_path: Path) -> None:
    view = prepare_tokens(
        token_files(write_bin(tmp_path / "val.bin")), EncodeRequest(encoder), tmp_path / "cache"
    )
    write_bin(tmp_path / "val.bin", IDS[::-1])
    with pytest.raises(ValueError, match="not what it was"):
        open_tokens(view)


def test_a_plan_over_a_token_file_needs_no_memory_for_its_windows(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    # 10^9 windows: a hole in a file stands for the ids, which the plan never looks at.
    offsets = np.array([0, 2 * 10**9])
    plan = make_plan(disjoint(2), offsets, batch_size=8)
    assert plan.num_windows == 10**9
    last = plan.windows(10**9 - 1, 10**9)
    assert (last.start[0], last.stop[0]) == (2 * 10**9 - 2, 2 * 10**9)


@pytest.mark.parametrize("two_first", [False, True])
def test_notes_are_those_of_the_run_and_not_of_the_cache(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_first: bool
) -> None:
    # As if the files had been there for long, so that their stamps count.
    monkeypatch.setattr(input_files, "_RACY_NS", 0)
    # The same documents from one file and from two, with and without a note about BOS.
    one = token_files(write_bin(tmp_path / "one.bin"), separator=SEPARATOR)
    two = token_files([write_bin(tmp_path / "a.bin", IDS[:6]), write_bin(tmp_path / "b.bin", IDS[6:])])
    cases = [(one, "never"), (one, "tokenizer"), (two, "never"), (two, "tokenizer")]
    for source, bos in (cases[::-1] if two_first else cases) * 2:
        notes = tokens_of(source, encoder, tmp_path / "cache", bos=bos).notes
        assert any("2 token files were copied" in note for note in notes) == (source is two)
        assert any("begin with one" in note for note in notes) == (bos == "tokenizer")
        assert len(notes) == (source is two) + (bos == "tokenizer")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "int32", ">u4", "int64", "uint64"])
def test_npy_is_read_by_its_header(encoder: TextEncoder, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "val.npy"
    np.save(path, IDS.astype(dtype))
    data = tokens_of(token_files(str(path), separator=SEPARATOR), encoder, tmp_path / "cache")
    assert data.tokens.tolist() == IDS.tolist()
    assert data.tokens.astype(np.int64).tolist() == IDS.tolist()
    assert data.tokens.dtype.isnative
    assert data.offsets_D1.tolist() == ENDS
    bare = tokens_of(
        token_files(write_bin(tmp_path / "val.bin"), separator=SEPARATOR), encoder, tmp_path / "cache"
    )
    assert data.fingerprint == bare.fingerprint
    if np.dtype(dtype).isnative:
        assert data.tokens.filename == path


def test_the_name_of_a_npy_file_may_be_any(encoder: TextEncoder, tmp_path: Path) -> None:
    with open(tmp_path / "val.bin", "wb") as file:
        np.save(file, IDS)
    source = token_files(str(tmp_path / "val.bin"))
    assert tokens_of(source, encoder, tmp_path / "cache").tokens.tolist() == IDS.tolist()


@pytest.mark.parametrize(("magic", "version"), [(20240520, 1), (20240801, 7), (20240801, 1)])
def test_llm_c_is_read_by_its_header(encoder: TextEncoder, tmp_path: Path, magic: int, version: int) -> None:
    path = write_llm_c(tmp_path / "val.bin", IDS, magic, version)
    data = tokens_of(token_files(path, separator=SEPARATOR), encoder, tmp_path / "cache")
    assert data.tokens.tolist() == IDS.tolist()
    assert data.offsets_D1.tolist() == ENDS
    assert data.tokens.filename == Path(path)
    several = token_files([path, write_bin(tmp_path / "more.bin", IDS[:4])])
    assert tokens_of(several, encoder, tmp_path / "cache").tokens.tolist() == [*IDS, *IDS[:4]]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, ids=IDS)
    return file.getvalue()


def parquet() -> bytes:
    file = io.BytesIO()
    datasets.Dataset.from_dict({"ids": [IDS.tolist()]}).to_parquet(file)
    return file.getvalue()


LLM_C = np.array([20240520, 1, 13, *[0] * 253], "<i4").tobytes()
SOME_BYTES = IDS.astype("uint16").tobytes()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", npy(IDS.astype("float32")), "type float32; a token file holds whole numbers"),
        ("a.npy", npy(IDS.astype("bool")), "type bool"),
        ("a.npy", npy(IDS[:12].reshape(3, 4)), r"shape \(3, 4\).*reshape\(-1\)"),
        ("a.npy", npy(np.array(5)), r"shape \(\)"),
        ("a.npy", npy(np.array([{}], dtype=object)), r"cannot be read as a \.npy"),
        ("a.npy", npy(IDS)[:-3], r"cannot be read as a \.npy"),
        ("a.npy", npy(IDS) + b"\0\0", "its header says"),
        ("a.npy", npy(IDS[:0]), r"a\.npy"),
        ("a.npy", b"\x93NUMPY\x01\x00v\x00{'descr': __import__('os')" + b" " * 90 + b"\n", "cannot be read"),
        ("a.bin", LLM_C + SOME_BYTES[:-2], "13 ids of uint16, which take 1050 bytes, not 1048"),
        ("a.bin", LLM_C + SOME_BYTES + b"\0\0", "not 1052"),
        ("a.bin", LLM_C[:4] + b"\2" + LLM_C[5:] + SOME_BYTES, "version 2"),
        ("a.bin", LLM_C[:600], "ends inside its header"),
        ("a.bin", LLM_C[:8] + b"\xff" * 4 + LLM_C[12:] + SOME_BYTES, "-1 ids"),
        ("a.bin", np.array([20240522, 1], "<i4").tobytes() + SOME_BYTES * 99, "multiple-choice"),
        ("a.npz", npz(), "zip archive"),
        ("a.bin", parquet(), "a Parquet file"),
        ("a.bin", safetensors.numpy.save({"ids": IDS}), "a safetensors file"),
        ("a.bin.gz", gzip.compress(SOME_BYTES), "gzip data, .*gzip -d"),
        ("a.bin", bz2.compress(SOME_BYTES), "bzip2 data"),
        ("a.bin", lzma.compress(SOME_BYTES), "xz data"),
        ("a.bin.zst", zstandard.compress(SOME_BYTES), "zstd data"),
        ("shard.00000.mds", SOME_BYTES, r"MosaicML streaming \(MDS\).*numpy\.save"),
        ("shard.00000.mds.zstd", zstandard.compress(SOME_BYTES), "MosaicML"),
        (
            "index.json",
            json.dumps({"shards": [{"column_names": ["tokens"], "format": "mds"}], "version": 2}).encode(),
            "MosaicML",
        ),
        ("a.idx", b"MMIDIDX\0\0" + SOME_BYTES, "a Megatron index, .*give the .bin"),
        ("a.idx", b"TNTIDX\0\0" + SOME_BYTES, "old Megatron"),
        ("a.txt", b"Only text, in plain words; no ids at all here.\n" * 2, "is text.*text_files"),
        ("a.txt", ("中文，也是文字。" * 300).encode(), "is text"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "uint16"])
def test_other_forms_are_refused_by_name(
    encoder: TextEncoder, tmp_path: Path, name: str, content: bytes, told: str, dtype: str | None
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        tokens_of(token_files(str(tmp_path / name), dtype=dtype), encoder, tmp_path / "cache")


def test_ids_that_look_like_the_first_bytes_of_gzip_are_ids(encoder: TextEncoder, tmp_path: Path) -> None:
    ids = np.concatenate([np.frombuffer(b"\x1f\x8b\x08\x00", "<u2"), IDS])
    wide = dataclasses.replace(encoder, vocab_size=50257)
    data = tokens_of(token_files(write_bin(tmp_path / "a.bin", ids)), wide, tmp_path / "cache")
    assert data.tokens.tolist() == ids.tolist()


SMALL, LARGE = 50257, 151936


def random_ids(vocab_size: int, size: int = 1000) -> np.ndarray:
    # Some ids are frequent, as in text.
    rng = np.random.default_rng(0)
    return np.where(rng.random(size) < 0.3, rng.integers(0, 50, size), rng.integers(0, vocab_size, size))


@pytest.mark.parametrize(
    ("vocab_size", "stored"),
    [
        (SMALL, "uint32"),
        (SMALL, "int32"),
        (SMALL, "int64"),
        (1 << 16, "uint32"),
        (LARGE, "int64"),
        (LARGE, "uint64"),
    ],
)
@pytest.mark.parametrize("size", [3, 1000, 1001])
def test_ids_of_a_wider_type_are_not_guessed(
    encoder: TextEncoder, tmp_path: Path, vocab_size: int, stored: str, size: int
) -> None:
    wide = dataclasses.replace(encoder, vocab_size=vocab_size)
    ids = random_ids(vocab_size, size)
    path = write_bin(tmp_path / "val.bin", ids, stored)
    with pytest.raises(ValueError, match=r"val\.bin does not state the type.*give dataset\.dtype \(uint16"):
        tokens_of(token_files(path), wide, tmp_path / "cache")
    if stored != "uint64":
        data = tokens_of(token_files(path, dtype=stored), wide, tmp_path / "cache")
        assert data.tokens.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("vocab_size", "assumed"), [(SMALL, "uint16"), (1 << 16, "uint16"), (LARGE, "uint32")]
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 1001])
def test_ids_of_the_smallest_type_need_no_dtype(
    encoder: TextEncoder, tmp_path: Path, vocab_size: int, assumed: str, size: int
) -> None:
    wide = dataclasses.replace(encoder, vocab_size=vocab_size)
    # Half of it padding: small ids at odd and at even places alike.
    for ids in (random_ids(vocab_size, size) + 4, np.append(random_ids(vocab_size, size), [0] * size + [9])):
        ids = np.minimum(ids, vocab_size - 1)
        data = tokens_of(token_files(write_bin(tmp_path / "v.bin", ids, assumed)), wide, tmp_path / "cache")
        assert data.tokens.tolist() == ids.tolist()


def test_a_wider_vocabulary_than_the_tokenizers_is_seen(encoder: TextEncoder, tmp_path: Path) -> None:
    # Ids of Llama 3 as uint32, read with a tokenizer that uses all of uint16: no single id is outside.
    wide = dataclasses.replace(encoder, vocab_size=1 << 16)
    path = write_bin(tmp_path / "val.bin", random_ids(128256), "uint32")
    with pytest.raises(ValueError, match="does not state the type"):
        tokens_of(token_files(path), wide, tmp_path / "cache")


def test_a_dtype_that_is_given_is_held_against_the_ids_and_the_header(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    wide = dataclasses.replace(encoder, vocab_size=SMALL)
    path = write_bin(tmp_path / "val.bin", random_ids(SMALL), "uint16")
    with pytest.raises(
        ValueError, match=r"holds the id \d+ at position \d+, outside the .*see dataset\.dtype"
    ):
        tokens_of(token_files(path, dtype="uint32"), wide, tmp_path / "cache")
    stating = [
        write_llm_c(tmp_path / "llmc.bin"),
        write_megatron(tmp_path / "megatron.bin", IDS, [13], [0, 1]),
        str(tmp_path / "a.npy"),
    ]
    np.save(stating[-1], IDS.astype("uint16"))
    for path in stating:
        tokens_of(token_files(path, dtype="uint16"), encoder, tmp_path / "cache")
        with pytest.raises(ValueError, match=r"dtype is uint32, but .* states that its ids are uint16"):
            tokens_of(token_files(path, dtype="uint32"), encoder, tmp_path / "cache")


def test_a_file_replaced_with_its_times_kept_is_not_mapped_by_an_old_view(
    encoder: TextEncoder, tmp_path: Path
) -> None:
    path = Path(write_bin(tmp_path / "val.bin"))
    view = prepare_tokens(token_files(str(path)), EncodeRequest(encoder), tmp_path / "cache")
    before = path.stat()
    write_bin(path, IDS[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="not what it was"):
        open_tokens(view)


def test_a_token_file_named_twice_is_read_once(encoder: TextEncoder, tmp_path: Path) -> None:
    path = write_bin(tmp_path / "val.bin")
    data = tokens_of(token_files([path, str(tmp_path / "*.bin")]), encoder, tmp_path / "cache")
    assert data.num_tokens == len(IDS)
    assert any("val.bin more than once" in note for note in data.notes)
    section = {"_component_": "ppl_eval.data.token_files", "paths": path}
    both = tokens_of(domains({"x": section, "y": section}), encoder, tmp_path / "cache")
    assert both.num_tokens == 2 * len(IDS)
    assert any("val.bin is in the domains x, y" in note for note in both.notes)
