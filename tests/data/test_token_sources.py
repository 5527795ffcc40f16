"""Token files of nanoGPT and Megatron: mapped, not copied, and no id is believed."""

import struct
from pathlib import Path

import numpy as np
import pytest

from helpers.sources import tokens_of
from helpers.tiny_tokenizers import hf_encoder
from helpers.token_files import IDS, SEPARATOR, write_bin, write_megatron
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
