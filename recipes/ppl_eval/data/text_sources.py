"""Text sources: plain files and tables on disk, and Hugging Face datasets. All of them read one document
after the other, in flat memory.

The same documents give the same fingerprint in whatever form they come.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_eval.data.documents import Part, digest_of, documents_of
from ppl_eval.data.input_files import (
    expand_paths,
    notes_on_shared_files,
    refuse_repeated,
    stamp_of,
)
from ppl_eval.data.plain_text import UNITS, LineEnds, plain_parts
from ppl_eval.data.sources import Content, EncodeRequest, Written
from ppl_eval.data.tables import TABLES, Columns, load_named, load_saved, read_table, rows_of, table_of
from ppl_eval.data.tokenize import write_text_tokens

BAD_LINES = ("error", "skip")


def no_stamp() -> None:
    """Stand for the stamp of a source that has none."""


@dataclass(frozen=True)
class TextSource:
    """Documents of text.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        read: starts a new pass over the documents; empty ones are left in and counted.
        read_parts: the same in parts, where a source has more to say than ``read`` can; it appends what a
            reader of the result must know to the list that it is given.
        stamp: see ``sources.Source``.
    """

    name: str
    parameters: dict[str, Any]
    read: Callable[[], Iterator[str]]
    read_parts: Callable[[list[str]], Iterator[Part]] | None = None
    stamp: Callable[[], Any] = no_stamp

    def parts(self, notes: list[str]) -> Iterator[Part]:
        """Start a new pass over all parts of all documents, in order."""
        if self.read_parts is not None:
            return self.read_parts(notes)
        return (Part(text) for text in self.read())

    def identify(self, request: EncodeRequest) -> Content:
        """Hash the text."""
        bos_tokens = request.encoder.bos_tokens(request.bos)
        notes: list[str] = []
        facts = digest_of(self.parts(notes))
        return Content(facts, tuple(notes), tuple(bos_tokens))

    def write(self, folder: Path, request: EncodeRequest, content: Content) -> Written:
        """Tokenise the text."""
        return write_text_tokens(folder, self.parts, request, content)

    def merge(self, sources: "Mapping[str, TextSource]") -> "TextSource":
        """Return one source of several, each a domain."""

        def read_parts(notes: list[str]) -> Iterator[Part]:
            for name, source in sources.items():
                own: list[str] = []
                for part in source.parts(own):
                    yield part._replace(domain=name)
                notes += [f"{name}: {note}" for note in own]
            notes += notes_on_shared_files(
                {name: s.parameters.get("paths", ()) for name, s in sources.items()}
            )

        def stamp() -> Any:
            stamps = {name: source.stamp() for name, source in sources.items()}
            return None if None in stamps.values() else stamps

        parameters = {"sources": {name: {"name": s.name, **s.parameters} for name, s in sources.items()}}
        return source_of_parts("domains", parameters, read_parts, stamp)


def source_of_parts(
    name: str,
    parameters: dict[str, Any],
    read_parts: Callable[[list[str]], Iterator[Part]],
    stamp: Callable[[], Any] = no_stamp,
) -> TextSource:
    """Return a source that reads in parts; its ``read`` joins them to documents."""
    return TextSource(name, parameters, lambda: documents_of(read_parts([])), read_parts, stamp)


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
    columns = Columns(column or "text", domain_column, skip_bad=bad_lines == "skip")
    named = expand_paths(paths)
    files = named.files
    tables = [table_of(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if (column is not None or domain_column is not None) and table is None:
            raise ValueError(
                f"dataset.column or domain_column is given, but {file} is no table by its suffix; tables end "
                f"in {', '.join(sorted(TABLES))}, JSON and CSV also in .gz or .zst after that"
            )
        if table is not None and unit != "file":
            raise ValueError(
                f"dataset.unit is {unit!r}, but {file} is a table, where a document is a row; leave unit out"
            )

    def read_parts(notes: list[str]) -> Iterator[Part]:
        notes += named.notes()
        line_ends = LineEnds()
        for file, table in zip(files, tables, strict=True):
            if table is None:
                yield from plain_parts(file, unit, line_ends)
            else:
                yield from read_table(file, table, columns, notes)
        notes += line_ends.notes(unit)

    parameters = named.parameters()
    if any(table is None for table in tables):
        parameters["unit"] = unit
    if any(tables):
        parameters |= {"column": column or "text", "domain_column": domain_column, "bad_lines": bad_lines}
    return source_of_parts("text_files", parameters, read_parts, lambda: stamp_of(files))


def hub_text(
    name: str,
    column: str = "text",
    *,
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
        ValueError: if ``split`` is missing or a local file is named twice, or (when it is read) the dataset,
            split or column does not exist.
    """
    folder = Path(name).expanduser()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    if not saved and split is None:
        raise ValueError(
            f"dataset.split is missing; name the split of {name} to score, for example split=test"
        )
    _check_choice("bad_lines", bad_lines, BAD_LINES)
    for files in data_files.values() if isinstance(data_files, Mapping) else [data_files]:
        if isinstance(files, list):
            refuse_repeated(files, "dataset.data_files")
    columns = Columns(column, domain_column, skip_bad=bad_lines == "skip")

    def read_parts(notes: list[str]) -> Iterator[Part]:
        if saved:
            rows = load_saved(folder, split)
        else:
            rows = load_named(
                name, config_name, split=split, revision=revision, streaming=streaming, data_files=data_files
            )
        yield from rows_of(rows, name, columns, notes)

    def stamp() -> Any:
        # A folder changes with its files; what a name on the hub stands for may change, whatever is cached.
        return stamp_of(sorted(path for path in folder.rglob("*") if path.is_file())) if saved else None

    parameters = {"name": name, "column": column, "split": split, "config_name": config_name}
    parameters |= {"revision": revision, "domain_column": domain_column}
    parameters |= {"bad_lines": bad_lines, "data_files": data_files}
    return source_of_parts("hub_text", parameters, read_parts, stamp)


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"dataset.{key} is {value!r}; allowed: {', '.join(allowed)}")
