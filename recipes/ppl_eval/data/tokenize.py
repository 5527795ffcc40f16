"""Text to token files, in one pass and flat memory: parts are counted, joined, cut, encoded in parallel and
written as they come.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ppl_eval.data.array_store import ArrayWriter
from ppl_eval.data.sources import ALL, Part, TextSource
from ppl_eval.tokenization.chunking import PIECE_CHARS, SeamError, checked, cut, group
from ppl_eval.tokenization.encoders import Encoding
from ppl_eval.tokenization.tokenizer import TextEncoder
from ppl_eval.tokenization.word_count import TextCounter, TextSize
from ppl_eval.tokenization.workers import encode_groups


class TextDigest:
    """A hash over documents and where they end; in what form they were stored leaves no trace. Empty
    documents count: where documents are joined, each adds a join.
    """

    def __init__(self) -> None:
        self._documents, self._domains = hashlib.sha256(), hashlib.sha256()
        self._document = hashlib.sha256()
        self._has_domains = False

    def add(self, part: Part) -> None:
        """Add the next part."""
        self._document.update(part.text.encode())
        if part.original is not None:
            self._document.update(b"\0original\0" + part.original.encode())
        if not part.is_last:
            return
        self._documents.update(self._document.digest())
        self._domains.update(hashlib.sha256(part.domain.encode()).digest())
        self._has_domains = self._has_domains or part.domain != ALL
        self._document = hashlib.sha256()

    def facts(self) -> dict[str, str]:
        """What identifies the text: one hash, and one of the domains where there are any."""
        facts = {"text_sha256": self._documents.hexdigest()}
        return facts | {"domains_sha256": self._domains.hexdigest()} if self._has_domains else facts


def digest_of(source: TextSource) -> tuple[dict[str, str], list[str]]:
    """Hashes of a source's text, and the source's notes."""
    digest, notes = TextDigest(), list[str]()
    for part in source.parts(notes):
        digest.add(part)
    return digest.facts(), notes


def write_text_tokens(
    folder: Path,
    source: TextSource,
    encoder: TextEncoder,
    join: str | None,
    bos_tokens: list[int],
    word_separator: str,
    expected: dict[str, str],
) -> dict[str, Any]:
    """Tokenise a source into a folder.

    Args:
        folder: an empty folder.
        source: the documents.
        encoder: the tokenizer.
        join: text between documents, which become one stream a domain; None keeps each on its own.
        bos_tokens: ids at the head of each stream or document.
        word_separator: how words are counted, see ``words``.
        expected: what ``digest_of`` said of the text.

    Returns:
        The description of what was written, for ``tokens.open_tokens``.

    Raises:
        ValueError: if there is no text, or it changed since it was hashed.
    """

    def write(encoding: Encoding) -> dict[str, Any]:
        return _Writing(folder, source, encoder, join, bos_tokens, word_separator).run(encoding, expected)

    with suppress(SeamError):
        return write(encoder.encoding)
    # Not while the error is handled: its traceback would keep the first pass's workers.
    shutil.rmtree(folder)
    folder.mkdir()
    return write(replace(encoder.encoding, cut_every=None, one_call="its pieces did not fit together"))


class _Writing:
    """The state of one pass: what the reading side counts while the writing side is some pieces behind."""

    def __init__(
        self,
        folder: Path,
        source: TextSource,
        encoder: TextEncoder,
        join: str | None,
        bos_tokens: list[int],
        word_separator: str,
    ) -> None:
        self.folder, self.source, self.join, self.bos_tokens = folder, source, join, bos_tokens
        self.word_separator = word_separator
        self.dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
        self.digest = TextDigest()
        self.domains: dict[str, int] = {}
        self.source_notes: list[str] = []
        self.num_documents = self.num_empty = self.num_crlf = self.num_bom = self.longest = 0
        # After a join, a row is a domain; otherwise a document. Sizes of joined rows grow until the end.
        self.joined_sizes: list[list[int]] = []
        self.columns = {name: self._writer(name, np.int64) for name in ("num_bytes", "num_words")}
        self.columns["domain"] = self._writer("domain", np.int32)

    def run(self, encoding: Encoding, expected: dict[str, str]) -> dict[str, Any]:
        arrays = self._write_tokens(encoding)
        if self.digest.facts() != expected:
            raise ValueError(
                f"the text of the dataset {self.source.name} changed while it was read; run again"
            )
        for name, sizes in zip(
            ("num_bytes", "num_words"), zip(*self.joined_sizes, strict=True), strict=False
        ):
            self.columns[name].extend(np.array(sizes))
        if self.join is not None:
            self.columns["domain"].extend(np.arange(len(self.domains)))
        if self.num_documents == 0:
            raise ValueError(
                f"the dataset {self.source.name} ({self.source.parameters}) has no text: {self.num_empty} "
                "documents, all of them empty"
            )
        notes = self._notes()
        if encoding.one_call and self.longest > PIECE_CHARS:
            notes.append(f"long texts were tokenised in one call, not in pieces: {encoding.one_call}")
        return {
            "arrays": {**arrays, **{name: column.close() for name, column in self.columns.items()}},
            "domains": list(self.domains),
            "num_documents": self.num_documents,
            "notes": notes,
        }

    def _write_tokens(self, encoding: Encoding) -> dict[str, Any]:
        groups = group(cut(self._streams(), encoding))
        pieces = checked(encode_groups(encoding.encode, groups))
        if self.join is None:
            tokens, offsets = self._writer("tokens", self.dtype), self._writer("offsets", np.int64)
            offsets.append(0)
            for piece in pieces:
                if piece.is_first:
                    tokens.extend(self.bos_tokens)
                tokens.extend(piece.ids)
                if piece.is_last:
                    offsets.append(tokens.length)
            return {"tokens": tokens.close(), "offsets": offsets.close()}
        streams: dict[int, ArrayWriter] = {}
        for piece in pieces:
            if piece.is_first:
                streams[piece.stream] = self._writer(f"stream_{piece.stream}", self.dtype)
                streams[piece.stream].extend(self.bos_tokens)
            streams[piece.stream].extend(piece.ids)
        return self._join([streams[domain] for domain in sorted(streams)])

    def _join(self, streams: list[ArrayWriter]) -> dict[str, Any]:
        offsets = self._writer("offsets", np.int64)
        offsets.append(0)
        tokens = self._writer("tokens", self.dtype)
        for stream in streams:
            stream.close()
            if len(streams) == 1:
                stream.path.replace(tokens.path)
            else:
                with open(stream.path, "rb") as source, open(tokens.path, "ab") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                stream.path.unlink()
            tokens.length += stream.length
            offsets.append(tokens.length)
        return {"tokens": tokens.close(), "offsets": offsets.close()}

    def _streams(self) -> Iterator[tuple[int, str, bool]]:
        """Text for ``cut``: documents that hold text, or streams of all of them with the join between,
        counted on the way.

        Empty documents are joined too: the published numbers come from scripts that join a data set's empty
        rows.
        """
        counter, num_chars, begins = TextCounter(self.word_separator), 0, True
        # Only where it takes long: a bar that comes and goes tells nothing.
        progress = tqdm(
            desc="tokenising", unit=" characters", unit_scale=True, delay=10, mininterval=5, leave=False
        )
        for part in self.source.parts(self.source_notes):
            self.digest.add(part)
            progress.update(len(part.text))
            counter.add(part.text if part.original is None else part.original)
            if begins and self.join is not None:
                domain = self.domains.setdefault(part.domain, len(self.domains))
                if domain == len(self.joined_sizes):
                    self.joined_sizes.append([0, 0])
                else:
                    yield domain, self.join, False
            num_chars += len(part.text)
            if num_chars and self.join is None:
                yield self.num_documents, part.text, part.is_last
            elif self.join is not None:
                yield domain, part.text, False
            begins = part.is_last
            if part.is_last:
                self._end_document(part.domain, counter.size(), num_chars)
                counter, num_chars = TextCounter(self.word_separator), 0
        progress.close()
        if self.join is not None:
            for domain in range(len(self.domains)):
                yield domain, "", True

    def _end_document(self, domain_name: str, size: TextSize, num_chars: int) -> None:
        if num_chars == 0:
            self.num_empty += 1
            return
        domain = self.domains.setdefault(domain_name, len(self.domains))
        if self.join is None:
            self.columns["num_bytes"].append(size.num_bytes)
            self.columns["num_words"].append(size.num_words)
            self.columns["domain"].append(domain)
            self.longest = max(self.longest, num_chars)
        else:
            self.joined_sizes[domain][0] += size.num_bytes
            self.joined_sizes[domain][1] += size.num_words
            self.longest += num_chars
        self.num_documents += 1
        self.num_crlf += size.has_crlf
        self.num_bom += size.has_bom

    def _notes(self) -> list[str]:
        notes = []
        num_all = self.num_documents + self.num_empty
        if self.num_empty:
            role = (
                "they score nothing"
                if self.join is None
                else "all that they add is the text between documents"
            )
            notes.append(f"{self.num_empty} of {num_all} documents are empty; {role}")
        if self.num_crlf:
            notes.append(
                f"{self.num_crlf} of {num_all} documents have CRLF line ends, scored as they are; the same "
                "text with LF gives another number"
            )
        if self.num_bom:
            notes.append(
                f"{self.num_bom} of {num_all} documents begin with a byte order mark (U+FEFF), which is "
                "scored"
            )
        return notes

    def _writer(self, name: str, dtype: Any) -> ArrayWriter:
        return ArrayWriter(self.folder / f"{name}.bin", dtype)
