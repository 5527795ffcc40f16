"""Plain text files: where documents end, and what is not UTF-8."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sources import tokens_of
from helpers.tiny_tokenizers import hf_encoder
from ppl_eval.data import plain_text, text_files


@given(
    lines=st.lists(st.sampled_from(["", " ", "a", "b  ", "\r", "\u2028", "\x0c", "中"])),
    chunk=st.integers(1, 7),
    data=st.data(),
)
def test_units_do_not_depend_on_how_a_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], chunk: int, data: st.DataObject
) -> None:
    text = "\n".join(lines) + ("\n" if data.draw(st.booleans()) else "")
    path = tmp_path_factory.mktemp("units") / "file.txt"
    path.write_bytes(text.encode())
    whole = plain_text._BLOCK_BYTES
    try:
        plain_text._BLOCK_BYTES = chunk
        assert "".join(text_files(str(path)).read()) == text
        by_line = list(text_files(str(path), unit="line").read())
        assert "\n".join(by_line) == text.replace("\r\n", "\n").removesuffix("\n")
        paragraphs = list(text_files(str(path), unit="blank_line").read())
    finally:
        plain_text._BLOCK_BYTES = whole
    expected: list[list[str]] = [[]]
    for line in by_line:
        expected[-1].append(line) if line.strip() else expected.append([])
    assert paragraphs == ["\n".join(group) for group in expected if group]


def test_text_that_is_not_utf8_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "_BLOCK_BYTES", 5)
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\ncaf\xe9 three")
    with pytest.raises(
        ValueError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 11 \(line 3\).*iconv"
    ):
        list(text_files(str(tmp_path / "latin.txt")).read())
    (tmp_path / "half.txt").write_bytes("中".encode()[:2])
    with pytest.raises(ValueError, match="offset 0"):
        list(text_files(str(tmp_path / "half.txt")).read())


CRLF = "one\r\n\r\ntwo\rtwo\r\n\nthree"


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 1 << 20])
def test_crlf_ends_lines_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(plain_text, "_BLOCK_BYTES", block_bytes)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(CRLF.encode())
    (tmp_path / "c.txt").write_bytes(b"four\n")
    expected = {
        "line": [*["one", "", "two\rtwo", "", "three"] * 2, "four"],
        "blank_line": [*["one", "two\rtwo", "three"] * 2, "four"],
        "file": [CRLF, CRLF, "four\n"],
    }
    for unit, documents in expected.items():
        source = text_files(str(tmp_path / "*.txt"), unit=unit)
        assert list(source.read()) == documents
        notes: list[str] = []
        list(source.parts(notes))
        ends, lone = ([note for note in notes if word in note] for word in ("CRLF", "old Macs"))
        assert len(ends) == (unit != "file")
        assert all(note.startswith("2 files have CRLF") for note in ends)
        # The \r inside a line stays what it is.
        assert [note.split(" have")[0] for note in lone] == ["2 files"]
    (tmp_path / "c.txt").rename(tmp_path / "c.md")
    for unit in expected:
        notes = []
        list(text_files(str(tmp_path / "*.md"), unit=unit).parts(notes))
        assert notes == []


def test_crlf_lines_have_the_tokens_of_lf_lines(tmp_path: Path) -> None:
    encoder = hf_encoder(tmp_path)
    (tmp_path / "crlf.txt").write_bytes(b"the cat\r\n\r\nthe dog\r\n")
    (tmp_path / "lf.txt").write_bytes(b"the cat\n\nthe dog\n")
    for unit in ("line", "blank_line"):
        crlf, lf = (
            tokens_of(text_files(str(tmp_path / name), unit=unit), encoder, tmp_path / "cache")
            for name in ("crlf.txt", "lf.txt")
        )
        assert crlf.tokens.tolist() == lf.tokens.tolist()
        assert crlf.num_documents == lf.num_documents == 2
        assert crlf.fingerprint == lf.fingerprint
        assert len(crlf.notes) == len(lf.notes) + 1
    whole = tokens_of(text_files(str(tmp_path / "crlf.txt")), encoder, tmp_path / "cache")
    assert any("CRLF line ends, scored as they are" in note for note in whole.notes)


def test_a_carriage_return_at_the_very_end_stays(tmp_path: Path) -> None:
    (tmp_path / "mac.txt").write_bytes(b"one\rtwo\r")
    notes: list[str] = []
    source = text_files(str(tmp_path / "mac.txt"), unit="line")
    assert list(source.read()) == ["one\rtwo\r"]
    list(source.parts(notes))
    assert len(notes) == 1
    assert "without a line feed" in notes[0]
