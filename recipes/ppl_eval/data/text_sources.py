"""Text sources: plain files and tables on disk, and Hugging Face datasets. All of them read one document
after the other, in flat memory.

The same documents give the same fingerprint in whatever form they come.
"""

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppl_eval.data.sources import (
    Part,
    TextSource,
    documents_of,
    expand_paths,
    open_binary,
    source_of_parts,
    stamp_of,
)
from ppl_eval.data.tables import TABLES, load_named, load_saved, read_table, rows_of

UNITS = ("file", "line", "blank_line")
BAD_LINES = ("error", "skip")
_CHUNK_BYTES = 1 << 20


def python_docs() -> TextSource:
    """The language reference that ships inside CPython (``pydoc_data.topics``), one document a topic, sorted
    by name.

    Real technical prose on every machine that runs this recipe. Its text differs between Python releases, and
    the fingerprint with it.
    """

    def read() -> Iterator[str]:
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name]

    return TextSource("python_docs", {}, read)


def text_files(
    paths: str | Sequence[str],
    unit: str = "file",
    column: str | None = None,
    domain_column: str | None = None,
    bad_lines: str = "error",
) -> TextSource:
    """Files of text: plain UTF-8, or tables (``.jsonl``, ``.json``, ``.csv``, ``.parquet``, ``.arrow``) with
    a column of text.

    Plain files, JSON and CSV may be compressed (``.gz``, ``.zst``).

    Args:
        paths: files or globs (``**`` goes into folders); a glob's files are sorted by name.
        unit: what a document is in a plain file: the whole ``file``, a ``line``, or a run of lines up to the
            next ``blank_line``. In a table it is a row.
        column: the column that holds the text; ``text`` where it is not given. Given, all files must be
            tables.
        domain_column: the column that names a row's domain.
        bad_lines: what to do with a line that is no JSON or CSV row, or a value that is no text: ``error``,
            or ``skip`` it and count it in the result's notes.

    Raises:
        ValueError: if an argument is none of the allowed ones, or a path names no file.
    """
    _check_choice("unit", unit, UNITS)
    _check_choice("bad_lines", bad_lines, BAD_LINES)
    files = expand_paths(paths)
    tables = [_table_of(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if (column is not None or domain_column is not None) and table is None:
            raise ValueError(
                f"dataset.column or domain_column is given, but {file} is no table (by its suffix); tables "
                "end in "
                f"{', '.join(sorted(TABLES))}, JSON and CSV also in .gz or .zst after that"
            )
        if table is not None and unit != "file":
            raise ValueError(
                f"dataset.unit is {unit!r}, but {file} is a table, where a document is a row; leave unit out"
            )

    def read_parts(notes: list[str]) -> Iterator[Part]:
        for file, table in zip(files, tables, strict=True):
            if table is None:
                yield from _plain_parts(file, unit)
            else:
                yield from read_table(
                    file, table, column or "text", domain_column, bad_lines == "skip", notes
                )

    parameters: dict[str, Any] = {"paths": [str(file) for file in files]}
    if any(table is None for table in tables):
        parameters["unit"] = unit
    if any(tables):
        parameters |= {"column": column or "text", "domain_column": domain_column, "bad_lines": bad_lines}
    return source_of_parts("text_files", parameters, read_parts, lambda: stamp_of(files))


def hub_text(
    name: str,
    column: str = "text",
    split: str | None = None,
    config_name: str | None = None,
    revision: str | None = None,
    streaming: bool = True,
    domain_column: str | None = None,
    data_files: Any = None,
    bad_lines: str = "error",
) -> TextSource:
    """A Hugging Face dataset: by name, or a folder that ``save_to_disk`` wrote.

    Args:
        name: the dataset's name on the hub, or a folder.
        column: the column that holds the text.
        split: which split; may be left out for a folder that holds a single one.
        config_name: the dataset's configuration (``wikitext-2-raw-v1``).
        revision: branch, tag or commit. Name a commit where the number must be reproducible.
        streaming: read while downloading and keep nothing, rather than download the whole split first.
        domain_column: the column that names a row's domain.
        data_files: files within the dataset, as ``datasets.load_dataset`` takes them.
        bad_lines: what to do with a value that is no text: ``error``, or ``skip`` it and count it in the
            notes.

    Raises:
        ValueError: if ``split`` is missing, or (when it is read) the dataset, split or column does not exist.
    """
    folder = Path(name).expanduser()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    if not saved and split is None:
        raise ValueError(
            f"dataset.split is missing; name the split of {name} to score, for example split=test"
        )
    _check_choice("bad_lines", bad_lines, BAD_LINES)

    def read_parts(notes: list[str]) -> Iterator[Part]:
        if saved:
            rows = load_saved(folder, split)
        else:
            rows = load_named(name, str(split), config_name, revision, streaming, data_files)
        yield from rows_of(rows, name, column, domain_column, bad_lines == "skip", notes)

    parameters: dict[str, Any] = {"name": name, "column": column, "split": split, "config_name": config_name}
    parameters |= {
        "revision": revision,
        "domain_column": domain_column,
        "bad_lines": bad_lines,
        "data_files": data_files,
    }
    # A saved folder does not change behind its files' backs; a name on the hub may, whatever was cached of
    # it.
    stamp = (
        (lambda: stamp_of(sorted(path for path in folder.rglob("*") if path.is_file()))) if saved else None
    )
    return source_of_parts("hub_text", parameters, read_parts, stamp)


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"dataset.{key} is {value!r}; allowed: {', '.join(allowed)}")


def _table_of(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in TABLES else None


def _plain_parts(file: Path, unit: str) -> Iterator[Part]:
    if unit == "line":
        yield from _lines(file)
    elif unit == "blank_line":
        yield from _paragraphs(file)
    else:
        for text in decoded(file):
            yield Part(text, is_last=False)
        yield Part("")


def _lines(file: Path) -> Iterator[Part]:
    rest = ""
    for text in decoded(file):
        # Only line feeds end a line: str.splitlines would also cut at form feeds and at Unicode separators.
        *lines, rest = text.split("\n")
        yield from map(Part, lines)
        if rest:
            yield Part(rest, is_last=False)
    if rest:
        yield Part("")


def _paragraphs(file: Path) -> Iterator[Part]:
    lines: list[str] = []
    num_chars = 0
    glue = ""
    for line in documents_of(_lines(file)):
        if line.strip():
            lines.append(line)
            num_chars += len(line)
            if num_chars > _CHUNK_BYTES:
                yield Part(glue + "\n".join(lines), is_last=False)
                lines, num_chars, glue = [], 0, "\n"
        elif lines or glue:
            yield Part(glue + "\n".join(lines) if lines else "")
            lines, num_chars, glue = [], 0, ""
    if lines or glue:
        yield Part(glue + "\n".join(lines) if lines else "")


def decoded(file: Path) -> Iterator[str]:
    """A file's text in chunks, decoded strictly and with its line ends as they are.

    Raises:
        ValueError: if the file cannot be read, is damaged, or is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    seen_bytes, seen_lines = 0, 0
    with open_binary(file) as binary:
        while True:
            chunk = binary.read(_CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = seen_bytes - pending + error.start
                line = seen_lines + error.object.count(b"\n", 0, error.start) + 1
                raise ValueError(
                    f"{file} is not UTF-8: byte {error.object[error.start]:#04x} at offset {at} (line "
                    f"{line}); convert it "
                    f"first, for example `iconv -f LATIN1 -t UTF-8 {file.name}`"
                ) from error
            if text:
                yield text
            if not chunk:
                return
            seen_bytes += len(chunk)
            seen_lines += chunk.count(b"\n")
