"""Token files that were made elsewhere: bare ids as nanoGPT writes them, or any of the forms of
``token_layouts``.

They are mapped where they lie, never copied (only several files of one run have to become one), and every id
is checked against the vocabulary before a model sees it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.data.array_cache import ArrayWriter
from ppl_eval.data.input_files import expand_paths, notes_on_shared_files, places_of, stamp_of
from ppl_eval.data.sources import ALL, Content, EncodeRequest, Written
from ppl_eval.data.token_layouts import Layout, WidthCheck, bare_layout, index_of, stated_layout
from ppl_eval.data.tokenize import token_dtype
from ppl_eval.tokenization.tokenizer import TextEncoder

DTYPES = ("uint16", "uint32", "int32", "int64")
# Ids that are looked at together.
_BLOCK = 1 << 22

Ids = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenSource:
    """Token files, and the domain of each.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        files: the domain and path of each file.
        dtype: type of the ids in files that do not state it; None for the smallest that holds the vocabulary.
        separator: id that ends a document in files without an index, or ``eos``; None where a file is one
            document.
        notes: what a reader of the result must know about the files.
    """

    name: str
    parameters: dict[str, Any]
    files: tuple[tuple[str, Path], ...]
    dtype: str | None
    separator: int | str | None
    notes: tuple[str, ...] = ()

    def stamp(self) -> Any:
        """Return a stamp of the files and their indices."""
        return stamp_of(self._all_files())

    def identify(self, request: EncodeRequest) -> Content:
        """Check all ids, and hash them (as 32-bit integers, so that the hash does not depend on the files'
        type).

        Raises:
            ValueError: if a file is damaged or empty, an id is outside the vocabulary, or the request's
                ``bos`` asks for what is not there.
        """
        places = places_of(self._all_files())
        tokens_sha, bounds_sha = hashlib.sha256(), hashlib.sha256()
        num_with_bos = num_documents = 0
        for domain, path in self.files:
            mapped = self._map(path, request.encoder)
            width = WidthCheck(request.encoder.vocab_size)
            for begin, block in _blocks(mapped.tokens):
                _check_ids(mapped, begin, block, request.encoder.vocab_size)
                tokens_sha.update(block.astype("<u4").tobytes())
                if mapped.is_guess:
                    width.add(block)
            if width.is_ambiguous():
                raise ValueError(
                    f"{path} does not state the type of its ids. They fit {mapped.tokens.dtype}, but every "
                    "second one is zero or nearly, as in a file of a wider type; give dataset.dtype "
                    f"({', '.join(DTYPES)})"
                )
            begin = 0
            for ends in self._document_ends(mapped, request.encoder):
                heads = np.concatenate([[begin], ends[:-1]]).astype(np.int64)
                first_ids = mapped.tokens[heads[heads < ends]]
                num_with_bos += int(np.count_nonzero(first_ids == request.encoder.bos_id))
                num_documents += len(ends)
                bounds_sha.update(ends.tobytes())
                begin = int(ends[-1])
            bounds_sha.update(domain.encode() + b"\0")
        facts = {"tokens_sha256": tokens_sha.hexdigest(), "boundaries_sha256": bounds_sha.hexdigest()}
        notes = [*self.notes, *_bos_notes(request, num_with_bos, num_documents)]
        if len(self.files) > 1:
            notes.append(
                f"{len(self.files)} token files were copied into one; a single file is mapped where it lies"
            )
        return Content(facts, tuple(notes), places=places)

    def write(self, folder: Path, request: EncodeRequest, content: Content) -> Written:
        """Write the boundaries of documents, and where the ids lie.

        A request that joins makes one document of each domain, as joined text would be; nothing is put
        between the parts.

        Raises:
            ValueError: if a file changed since ``identify``.
        """
        offsets = ArrayWriter(folder / "offsets.bin", np.int64)
        domain_column = ArrayWriter(folder / "domain.bin", np.int32)
        offsets.append(0)
        # A domain's files lie together in the stream.
        domains = list(dict.fromkeys(domain for domain, _ in self.files))
        files: list[_Mapped] = []
        num_documents = base = 0
        for index, name in enumerate(domains):
            for path in (path for domain, path in self.files if domain == name):
                mapped = self._map(path, request.encoder)
                for ends in self._document_ends(mapped, request.encoder):
                    num_documents += len(ends)
                    if request.join is None:
                        offsets.extend(ends + base)
                        domain_column.extend(np.full(len(ends), index))
                base += len(mapped.tokens)
                files.append(mapped)
            if request.join is not None:
                offsets.append(base)
                domain_column.append(index)
        in_place = len(files) == 1 and files[0].tokens.dtype.isnative
        tokens = _in_place(files[0]) if in_place else _copy(folder, files, token_dtype(request))
        if places_of(self._all_files()) != content.places:
            raise ValueError("the token files of the dataset changed while they were read; run again")
        arrays = {"tokens": tokens, "offsets": offsets.close(), "domain": domain_column.close()}
        return Written(arrays, domains, num_documents, notes=[])

    def merge(self, sources: "Mapping[str, TokenSource]") -> "TokenSource":
        """Return one source of several, each a domain.

        Raises:
            ValueError: if they disagree about how a file is read.
        """
        if len({(source.dtype, source.separator) for source in sources.values()}) > 1:
            raise ValueError(
                "dataset.sources: all token_files of one run must have the same dtype and separator"
            )
        files = tuple((name, path) for name, source in sources.items() for _, path in source.files)
        parameters = {"sources": {name: source.parameters for name, source in sources.items()}}
        notes = [f"{name}: {note}" for name, source in sources.items() for note in source.notes]
        notes += notes_on_shared_files(
            {name: [str(path) for _, path in source.files] for name, source in sources.items()}
        )
        return TokenSource("domains", parameters, files, self.dtype, self.separator, tuple(notes))

    def _all_files(self) -> list[Path]:
        indices = [index_of(path) for _, path in self.files]
        return [*(path for _, path in self.files), *(index for index in indices if index is not None)]

    def _map(self, path: Path, encoder: TextEncoder) -> "_Mapped":
        stated = stated_layout(path)
        if stated is None:
            dtype = np.dtype(self.dtype or ("uint16" if encoder.vocab_size <= 1 << 16 else "uint32"))
            return _opened(path, bare_layout(path, dtype), is_guess=self.dtype is None)
        if self.dtype is not None and stated.dtype.newbyteorder("=") != self.dtype:
            raise ValueError(
                f"dataset.dtype is {self.dtype}, but {path} states that its ids are {stated.dtype}; leave "
                "dtype out"
            )
        if stated.length == 0:
            raise ValueError(f"{path} is empty")
        return _opened(path, stated)

    def _document_ends(self, mapped: "_Mapped", encoder: TextEncoder) -> Iterator[npt.NDArray[np.int64]]:
        """Yield where the documents of a file end, ascending, some at a time."""
        if mapped.ends is not None:
            yield mapped.ends
            return
        last = 0
        if self.separator is not None:
            separator = encoder.eos_id if self.separator == "eos" else self.separator
            if separator is None:
                raise ValueError(
                    "dataset.separator is eos, but this tokenizer has no EOS; give the separator's id"
                )
            for begin, block in _blocks(mapped.tokens):
                ends = np.flatnonzero(block == separator) + (begin + 1)
                if len(ends):
                    last = int(ends[-1])
                    yield ends
            if last == 0:
                raise ValueError(
                    f"{mapped.path} does not hold the separator {separator} even once; give the id that ends "
                    "its documents as dataset.separator, or null to score the file as one document"
                )
        if last < len(mapped.tokens):
            yield np.array([len(mapped.tokens)], dtype=np.int64)


@dataclass(frozen=True)
class _Mapped:
    """An opened token file: its ids and where they begin, where documents end if an index says so, and
    whether their type is a guess."""

    path: Path
    tokens: Ids
    begin_bytes: int
    ends: npt.NDArray[np.int64] | None
    is_guess: bool


def _opened(path: Path, layout: Layout, is_guess: bool = False) -> _Mapped:
    tokens = np.memmap(path, layout.dtype, "r", layout.begin_bytes, (layout.length,))
    return _Mapped(path, tokens, layout.begin_bytes, layout.ends, is_guess)


def token_files(
    paths: str | Sequence[str], dtype: str | None = None, separator: int | str | None = None
) -> TokenSource:
    """Files of token ids.

    A ``.bin`` with a Megatron ``.idx`` beside it has type and document boundaries from there; ``.npy`` and
    the ``.bin`` of llm.c and modded-nanogpt state their type. Any other file is ids and nothing else, as
    nanoGPT writes them.

    Args:
        paths: files or globs.
        dtype: type of the ids in a file that does not state it, one of ``DTYPES``; null takes uint16 where
            the vocabulary fits in it, else uint32, and refuses a file that may be of a wider type.
        separator: id of the token that ends each document (it stays the document's last token), or ``eos``;
            null makes a file without an index one document.

    Raises:
        ValueError: if an argument is none of the allowed ones, or a path names no file.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dataset.dtype is {dtype!r}; allowed: {', '.join(DTYPES)}, or null")
    if not (separator is None or separator == "eos" or (type(separator) is int and separator >= 0)):
        raise ValueError(f"dataset.separator is {separator!r}; it must be a token id, eos, or null")
    named = expand_paths(paths)
    parameters = {**named.parameters(), "dtype": dtype, "separator": separator}
    files = tuple((ALL, file) for file in named.files)
    return TokenSource("token_files", parameters, files, dtype, separator, tuple(named.notes()))


def _bos_notes(request: EncodeRequest, num_with_bos: int, num_documents: int) -> list[str]:
    if request.bos == "always" and num_with_bos < num_documents:
        raise ValueError(
            f"protocol.bos is 'always', but only {num_with_bos} of {num_documents} documents in the token "
            f"files begin with BOS (id {request.encoder.bos_id}), and nothing can be put into a file; use "
            "protocol.bos=never or each_window"
        )
    if request.bos != "tokenizer":
        return []
    return [
        f"token files hold the BOS they hold: {num_with_bos} of {num_documents} documents begin with one; "
        "none was added"
    ]


def _in_place(mapped: _Mapped) -> dict[str, Any]:
    at = mapped.path.stat()
    return {
        "file": str(mapped.path.resolve()),
        "dtype": mapped.tokens.dtype.name,
        "begin_bytes": mapped.begin_bytes,
        "length": len(mapped.tokens),
        "st_ino": at.st_ino,
        "st_mtime_ns": at.st_mtime_ns,
        "st_ctime_ns": at.st_ctime_ns,
    }


def _copy(folder: Path, files: list[_Mapped], dtype: npt.DTypeLike) -> dict[str, Any]:
    tokens = ArrayWriter(folder / "tokens.bin", dtype)
    for mapped in files:
        for _, block in _blocks(mapped.tokens):
            tokens.extend(block.astype(np.int64))
    return tokens.close()


def _check_ids(mapped: _Mapped, begin: int, block: Ids, vocab_size: int) -> None:
    if block.min() >= 0 and block.max() < vocab_size:
        return
    at = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
    raise ValueError(
        f"{mapped.path} holds the id {block[at]} at position {begin + at}, outside the tokenizer's "
        f"vocabulary of {vocab_size}. The file is of another tokenizer, or not of {block.dtype} ids: see "
        f"dataset.dtype ({', '.join(DTYPES)})"
    )


def _blocks(tokens: Ids) -> Iterator[tuple[int, Ids]]:
    for begin in range(0, len(tokens), _BLOCK):
        yield begin, np.asarray(tokens[begin : begin + _BLOCK])
