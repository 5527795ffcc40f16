"""Token files that were made elsewhere: flat ``.bin`` as nanoGPT writes them, ``.bin`` with ``.idx`` as
Megatron does.

They are mapped where they lie, never copied (only several files of one run have to become one), and every id
is checked against the vocabulary before a model sees it.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.data.array_store import ArrayWriter
from ppl_eval.data.sources import ALL, expand_paths, stamp_of
from ppl_eval.tokenization.tokenizer import TextEncoder

DTYPES = ("uint16", "uint32", "int32", "int64")
# The head of Megatron-LM's index files (``indexed_dataset.py``): magic, version, type code, then counts of
# sequences and of document boundaries.
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_CHUNK = 1 << 22


@dataclass(frozen=True)
class TokenSource:
    """Token files, and the domain of each.

    Attributes:
        name: the factory's name.
        parameters: what it was called with, for the result.
        files: the domain and path of each file.
        dtype: type of the ids in files without an index; None for the smallest that holds the vocabulary.
        separator: id that ends a document in files without an index, or ``eos``; None where a file is one
            document.
    """

    name: str
    parameters: dict[str, Any]
    files: tuple[tuple[str, Path], ...]
    dtype: str | None
    separator: int | str | None

    def stamp(self) -> Any:
        """Changes when a file may have changed."""
        indices = [path.with_suffix(".idx") for _, path in self.files]
        return stamp_of([*(path for _, path in self.files), *(path for path in indices if path.is_file())])

    def merge(self, sources: "Mapping[str, TokenSource]") -> "TokenSource":
        """One source of several, each a domain.

        Raises:
            ValueError: if they disagree about how a file is read.
        """
        if len({(source.dtype, source.separator) for source in sources.values()}) > 1:
            raise ValueError(
                "dataset.sources: all token_files of one run must have the same dtype and separator"
            )
        files = tuple((name, path) for name, source in sources.items() for _, path in source.files)
        parameters = {"sources": {name: source.parameters for name, source in sources.items()}}
        return TokenSource("domains", parameters, files, self.dtype, self.separator)


def token_files(
    paths: str | Sequence[str], dtype: str | None = None, separator: int | str | None = None
) -> TokenSource:
    """Files of token ids.

    A ``.bin`` with a Megatron ``.idx`` beside it has type and document boundaries from there. Any other file
    is ids and nothing else, as nanoGPT writes them.

    Args:
        paths: ``.bin`` files or globs.
        dtype: type of the ids in a file without an index, one of ``DTYPES``; null takes uint16 where the
            vocabulary fits in it, else uint32.
        separator: id of the token that ends each document (it stays the document's last token), or ``eos``;
            null makes a file without an index one document.

    Raises:
        ValueError: if an argument is none of the allowed ones, or a path names no file.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dataset.dtype is {dtype!r}; allowed: {', '.join(DTYPES)}, or null")
    if not (separator is None or separator == "eos" or (type(separator) is int and separator >= 0)):
        raise ValueError(f"dataset.separator is {separator!r}; it must be a token id, eos, or null")
    files = expand_paths(paths)
    parameters = {"paths": [str(file) for file in files], "dtype": dtype, "separator": separator}
    return TokenSource("token_files", parameters, tuple((ALL, file) for file in files), dtype, separator)


@dataclass(frozen=True)
class _Mapped:
    """An opened token file: its ids, and where documents end if an index says so."""

    path: Path
    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64] | None


def inspect_token_files(
    source: TokenSource, encoder: TextEncoder, bos: str
) -> tuple[dict[str, str], list[str]]:
    """Check all ids, and hash them (as 32-bit integers, so that the hash does not depend on the files' type).

    Returns:
        What identifies the ids, and notes.

    Raises:
        ValueError: if a file is damaged or empty, an id is outside the vocabulary, or ``bos`` asks for what
            is not there.
    """
    tokens_sha, bounds_sha = hashlib.sha256(), hashlib.sha256()
    num_heads = num_documents = 0
    for domain, path in source.files:
        mapped = _map(path, source, encoder)
        for begin, chunk in _chunks(mapped.tokens):
            _check_ids(mapped, begin, chunk, encoder.vocab_size)
            tokens_sha.update(chunk.astype("<u4").tobytes())
        begin = 0
        for ends in _document_ends(mapped, source, encoder):
            heads = np.concatenate([[begin], ends[:-1]]).astype(np.int64)
            num_heads += int(np.count_nonzero(mapped.tokens[heads[heads < ends]] == encoder.bos_id))
            num_documents += len(ends)
            bounds_sha.update(ends.tobytes())
            begin = int(ends[-1])
        bounds_sha.update(domain.encode() + b"\0")
    notes = []
    if bos == "always" and num_heads < num_documents:
        raise ValueError(
            f"protocol.bos is 'always', but only {num_heads} of {num_documents} documents in the token files "
            "begin with BOS "
            f"(id {encoder.bos_id}), and nothing can be put into a file; use protocol.bos=never or "
            "each_window"
        )
    if bos == "tokenizer":
        notes.append(
            f"token files hold the BOS they hold: {num_heads} of {num_documents} documents begin with one; "
            "none was added"
        )
    return {"tokens_sha256": tokens_sha.hexdigest(), "boundaries_sha256": bounds_sha.hexdigest()}, notes


def write_token_files(
    folder: Path, source: TokenSource, encoder: TextEncoder, join: str | None
) -> dict[str, Any]:
    """Write boundaries of token files into a folder, and where their ids lie.

    Args:
        folder: an empty folder.
        source: the files.
        encoder: the tokenizer that the ids are of.
        join: not None makes one document of each domain, as joined text would be; nothing is put between the
            parts.

    Returns:
        The description of what was written, for ``tokens.open_tokens``.
    """
    offsets, domain_column = (
        ArrayWriter(folder / "offsets.bin", np.int64),
        ArrayWriter(folder / "domain.bin", np.int32),
    )
    offsets.append(0)
    domains: dict[str, int] = {}
    num_documents = base = 0
    # A domain's files lie together in the stream.
    names = list(dict.fromkeys(domain for domain, _ in source.files))
    files = [(domain, path) for name in names for domain, path in source.files if domain == name]
    for position, (domain, path) in enumerate(files):
        mapped = _map(path, source, encoder)
        index = domains.setdefault(domain, len(domains))
        for ends in _document_ends(mapped, source, encoder):
            num_documents += len(ends)
            if join is None:
                offsets.extend(ends + base)
                domain_column.extend(np.full(len(ends), index))
        base += len(mapped.tokens)
        if join is not None and (position + 1 == len(files) or files[position + 1][0] != domain):
            offsets.append(base)
            domain_column.append(index)
    arrays = {"offsets": offsets.close(), "domain": domain_column.close()}
    notes = []
    if len(files) == 1:
        stat = path.stat()
        own = {"dtype": mapped.tokens.dtype.name, "length": base, "mtime_ns": stat.st_mtime_ns}
        arrays["tokens"] = {"file": str(path.resolve()), **own}
    else:
        arrays["tokens"] = _copy(folder, [_map(path, source, encoder) for _, path in files])
        notes.append(f"{len(files)} token files were copied into one; a single file is mapped where it lies")
    return {"arrays": arrays, "domains": list(domains), "num_documents": num_documents, "notes": notes}


def _copy(folder: Path, files: list[_Mapped]) -> dict[str, Any]:
    tokens = ArrayWriter(folder / "tokens.bin", np.result_type(*(mapped.tokens.dtype for mapped in files)))
    for mapped in files:
        for _, chunk in _chunks(mapped.tokens):
            tokens.extend(chunk)
    return tokens.close()


def _map(path: Path, source: TokenSource, encoder: TextEncoder) -> _Mapped:
    index = path.with_suffix(".idx")
    if index.is_file() and index != path:
        return _map_megatron(path, index)
    dtype = np.dtype(source.dtype or ("uint16" if encoder.vocab_size <= 1 << 16 else "uint32"))
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is no whole number of {dtype} ids; it is cut off, or "
            "dataset.dtype is another"
        )
    return _Mapped(path, np.memmap(path, dtype=dtype, mode="r"), None)


def _map_megatron(path: Path, index: Path) -> _Mapped:
    content = index.read_bytes()
    if len(content) < _HEAD.size or content[:9] != _MAGIC:
        raise ValueError(
            f"{index} is no Megatron index (it begins with {content[:9]!r}); move it away if it is none"
        )
    _, version, code, num_sequences, num_bounds = _HEAD.unpack_from(content)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise ValueError(
            f"{index} has version {version} and type code {code}; known are version 1 and {_MEGATRON_DTYPES}"
        )
    if len(content) < _HEAD.size + 12 * num_sequences + 8 * num_bounds:
        raise ValueError(
            f"{index} is cut off: {len(content)} bytes for {num_sequences} sequences, {num_bounds} bounds"
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    lengths = np.frombuffer(content, np.int32, num_sequences, _HEAD.size).astype(np.int64)
    pointers = np.frombuffer(content, np.int64, num_sequences, _HEAD.size + 4 * num_sequences)
    bounds = np.frombuffer(content, np.int64, num_bounds, _HEAD.size + 12 * num_sequences)
    ends = np.cumsum(lengths)
    if not np.array_equal(pointers, (ends - lengths) * dtype.itemsize):
        raise ValueError(
            f"{index} speaks of sequences that do not lie back to back in {path.name}; that is not supported"
        )
    num_tokens = int(ends[-1]) if num_sequences else 0
    size = path.stat().st_size
    if num_tokens == 0 or size != num_tokens * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, but {index.name} speaks of {num_tokens} ids of {dtype}; one is damaged"
        )
    if num_bounds == 0 or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{index} has document bounds that do not run from 0 to {num_sequences}; it is damaged"
        )
    document_ends = np.concatenate([[0], ends])[bounds[1:]]
    return _Mapped(path, np.memmap(path, dtype=dtype, mode="r"), document_ends)


def _document_ends(
    mapped: _Mapped, source: TokenSource, encoder: TextEncoder
) -> Iterator[npt.NDArray[np.int64]]:
    """Where the documents of a file end, ascending, some at a time."""
    if mapped.ends is not None:
        yield mapped.ends
        return
    last = 0
    if source.separator is not None:
        separator = encoder.eos_id if source.separator == "eos" else source.separator
        if separator is None:
            raise ValueError(
                "dataset.separator is eos, but this tokenizer has no EOS; give the separator's id"
            )
        for begin, chunk in _chunks(mapped.tokens):
            ends = np.flatnonzero(chunk == separator) + (begin + 1)
            if len(ends):
                last = int(ends[-1])
                yield ends
        if last == 0:
            raise ValueError(
                f"{mapped.path} does not hold the separator {separator} even once; give the id that ends its "
                "documents as "
                "dataset.separator, or null to score the file as one document"
            )
    if last < len(mapped.tokens):
        yield np.array([len(mapped.tokens)], dtype=np.int64)


def _check_ids(mapped: _Mapped, begin: int, chunk: npt.NDArray[Any], vocab_size: int) -> None:
    if chunk.min() >= 0 and chunk.max() < vocab_size:
        return
    at = int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
    raise ValueError(
        f"{mapped.path} holds the id {chunk[at]} at position {begin + at}, outside the tokenizer's "
        f"vocabulary of {vocab_size}. "
        f"The file is of another tokenizer, or not of {chunk.dtype} ids: see dataset.dtype "
        f"({', '.join(DTYPES)})"
    )


def _chunks(tokens: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    for begin in range(0, len(tokens), _CHUNK):
        yield begin, np.asarray(tokens[begin : begin + _CHUNK])
