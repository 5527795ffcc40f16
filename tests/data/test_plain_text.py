"""Plain text files: where documents end, and what is not UTF-8."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
