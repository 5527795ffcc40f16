"""Text to token arrays, in one pass and flat memory: parts are counted, joined, cut, encoded in parallel and
written as they come.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ppl_eval.data.array_cache import ArrayWriter
from ppl_eval.data.documents import Part, TextDigest
from ppl_eval.data.sources import Content, EncodeRequest, Written
from ppl_eval.tokenization.chunking import CHUNK_CHARS, SeamError, checked, cut, group
from ppl_eval.tokenization.encoders import Encoding
from ppl_eval.tokenization.word_count import TextCounter, TextSize
from ppl_eval.tokenization.workers import encode_groups

ReadParts = Callable[[list[str]], Iterator[Part]]


def write_text_tokens(
    folder: Path, read_parts: ReadParts, request: EncodeRequest, content: Content
) -> Written:
    """Tokenise documents into a folder.

    Args:
        folder: an empty folder.
        read_parts: starts a pass over the documents; its notes are those of ``content``.
        request: how to encode.
        content: what an earlier pass found.

    Raises:
        ValueError: if there is no text, or it changed since the earlier pass.
    """
    encoding = request.encoder.encoding
    with suppress(SeamError):
        return _TextPass(folder, request, content).run(read_parts, encoding)
    # Not while the error is handled: its traceback would keep the first pass's workers alive.
    shutil.rmtree(folder)
    folder.mkdir()
    whole = replace(encoding, cut_every=None, one_call="its chunks did not fit together")
    return _TextPass(folder, request, content).run(read_parts, whole)


class _TextPass:
    """The state of one pass: the side that reads counts, while the side that writes is some chunks behind."""

    def __init__(self, folder: Path, request: EncodeRequest, content: Content) -> None:
        self.folder, self.request, self.content = folder, request, content
        self.digest = TextDigest()
        self.domains: dict[str, int] = {}
        self.num_documents = self.num_empty = self.num_crlf = self.num_bom = 0
        self.longest_chars = 0
        # Bytes and words of each domain's stream, where documents are joined; they grow until the end.
        self.joined_sizes: list[list[int]] = []
        self.columns = {name: self._writer(name, np.int64) for name in ("num_bytes", "num_words")}
        self.columns["domain"] = self._writer("domain", np.int32)

    def run(self, read_parts: ReadParts, encoding: Encoding) -> Written:
        chunks = checked(encode_groups(encoding.encode, group(cut(self._streams(read_parts), encoding))))
        arrays = self._write_documents(chunks) if self.request.join is None else self._write_joined(chunks)
        if self.digest.facts() != self.content.facts:
            raise ValueError("the text of the dataset changed while it was read; run again")
        if self.num_documents == 0:
            raise ValueError(f"the dataset has no text: {self.num_empty} documents, all of them empty")
        if self.request.join is not None:
            num_bytes, num_words = zip(*self.joined_sizes, strict=True)
            self.columns["num_bytes"].extend(num_bytes)
            self.columns["num_words"].extend(num_words)
            self.columns["domain"].extend(range(len(self.domains)))
        notes = self._notes()
        if encoding.one_call and self.longest_chars > CHUNK_CHARS:
            notes.append(f"long texts were tokenised in one call, not in chunks: {encoding.one_call}")
        arrays |= {name: column.close() for name, column in self.columns.items()}
        return Written(arrays, list(self.domains), self.num_documents, notes)

    def _write_documents(self, chunks: Iterator[Any]) -> dict[str, Any]:
        tokens, offsets = self._token_writer("tokens"), self._writer("offsets", np.int64)
        offsets.append(0)
        for chunk in chunks:
            if chunk.is_first:
                tokens.extend(self.content.bos_tokens)
            tokens.extend(chunk.ids)
            if chunk.is_last:
                offsets.append(tokens.length)
        return {"tokens": tokens.close(), "offsets": offsets.close()}

    def _write_joined(self, chunks: Iterator[Any]) -> dict[str, Any]:
        streams: dict[int, ArrayWriter] = {}
        for chunk in chunks:
            if chunk.is_first:
                streams[chunk.stream] = self._token_writer(f"stream_{chunk.stream}")
                streams[chunk.stream].extend(self.content.bos_tokens)
            streams[chunk.stream].extend(chunk.ids)
        offsets, tokens = self._writer("offsets", np.int64), self._token_writer("tokens")
        offsets.append(0)
        for _, stream in sorted(streams.items()):
            tokens.take(stream)
            offsets.append(tokens.length)
        return {"tokens": tokens.close(), "offsets": offsets.close()}

    def _streams(self, read_parts: ReadParts) -> Iterator[tuple[int, str, bool]]:
        """Yield text for ``cut``, and count it on the way: documents that hold text, or one stream a domain
        of all documents with the join between.

        Empty documents are joined too: the published numbers come from scripts that join a data set's empty
        rows.
        """
        join = self.request.join
        counter, num_chars, begins = TextCounter(self.request.word_separator), 0, True
        # Only where it takes long: nobody can read a bar that is gone at once.
        progress = tqdm(
            desc="tokenising", unit=" characters", unit_scale=True, delay=10, mininterval=5, leave=False
        )
        for part in read_parts([]):
            self.digest.add(part)
            progress.update(len(part.text))
            counter.add(part.text if part.original is None else part.original)
            if begins and join is not None:
                domain = self.domains.setdefault(part.domain, len(self.domains))
                if domain == len(self.joined_sizes):
                    self.joined_sizes.append([0, 0])
                else:
                    yield domain, join, False
            num_chars += len(part.text)
            if join is not None:
                yield domain, part.text, False
            elif num_chars:
                yield self.num_documents, part.text, part.is_last
            begins = part.is_last
            if part.is_last:
                self._end_document(part.domain, counter.size(), num_chars)
                counter, num_chars = TextCounter(self.request.word_separator), 0
        progress.close()
        if join is not None:
            for domain in range(len(self.domains)):
                yield domain, "", True

    def _end_document(self, domain_name: str, size: TextSize, num_chars: int) -> None:
        if num_chars == 0:
            self.num_empty += 1
            return
        domain = self.domains.setdefault(domain_name, len(self.domains))
        if self.request.join is None:
            self.columns["num_bytes"].append(size.num_bytes)
            self.columns["num_words"].append(size.num_words)
            self.columns["domain"].append(domain)
            self.longest_chars = max(self.longest_chars, num_chars)
        else:
            self.joined_sizes[domain][0] += size.num_bytes
            self.joined_sizes[domain][1] += size.num_words
            self.longest_chars += num_chars
        self.num_documents += 1
        self.num_crlf += size.has_crlf
        self.num_bom += size.has_bom

    def _notes(self) -> list[str]:
        notes = []
        num_all = self.num_documents + self.num_empty
        if self.num_empty:
            role = (
                "they score nothing"
                if self.request.join is None
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

    def _token_writer(self, name: str) -> ArrayWriter:
        return self._writer(name, token_dtype(self.request))


def token_dtype(request: EncodeRequest) -> Any:
    """Return the smallest unsigned type that holds the vocabulary."""
    return np.uint16 if request.encoder.vocab_size <= 1 << 16 else np.uint32
