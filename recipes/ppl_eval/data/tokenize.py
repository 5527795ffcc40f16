"""Text to token arrays, in one pass and flat memory: parts are counted, joined, cut, encoded in parallel and
written as they come.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ppl_eval.data.array_cache import ArrayWriter
from ppl_eval.data.documents import Part, TextDigest
from ppl_eval.data.sources import Content, EncodeRequest, Written
from ppl_eval.tokenization.chunking import CHUNK_CHARS, EncodedChunk, SeamError, checked, cut, group
from ppl_eval.tokenization.encoders import Encoding
from ppl_eval.tokenization.text_spans import Measure
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
        # Bytes and words of each domain's stream, joins included, where documents are joined.
        self.joined_counters: list[TextCounter] = []
        self.columns = {name: self._writer(name, np.int64) for name in ("num_bytes", "num_words")}
        self.columns["domain"] = self._writer("domain", np.int32)

    def run(self, read_parts: ReadParts, encoding: Encoding) -> Written:
        measure = None
        if encoding.spans is not None:
            measure = Measure(encoding.spans(), self.request.word_separator)
        groups = group(cut(self._streams(read_parts), encoding))
        chunks = checked(encode_groups(encoding.encode, groups, measure=measure))
        arrays = self._write_documents(chunks) if self.request.join is None else self._write_joined(chunks)
        if self.digest.facts() != self.content.facts:
            raise ValueError("the text of the dataset changed while it was read; run again")
        if self.num_documents == 0:
            raise ValueError(f"the dataset has no text: {self.num_empty} documents, all of them empty")
        if self.request.join is not None:
            sizes = [counter.size() for counter in self.joined_counters]
            self.columns["num_bytes"].extend([size.num_bytes for size in sizes])
            self.columns["num_words"].extend([size.num_words for size in sizes])
            self.columns["domain"].extend(range(len(self.domains)))
        notes = self._notes()
        if encoding.one_call and self.longest_chars > CHUNK_CHARS:
            notes.append(f"long texts were tokenised in one call, not in chunks: {encoding.one_call}")
        arrays |= {name: column.close() for name, column in self.columns.items()}
        return Written(arrays, list(self.domains), self.num_documents, notes)

    def _write_documents(self, chunks: Iterator[EncodedChunk]) -> dict[str, Any]:
        stream, offsets = self._stream("tokens"), self._writer("offsets", np.int64)
        offsets.append(0)
        for chunk in chunks:
            stream.add(chunk, self.content.bos_tokens)
            if chunk.is_last:
                offsets.append(stream.tokens.length)
        return {**stream.close(), "offsets": offsets.close()}

    def _write_joined(self, chunks: Iterator[EncodedChunk]) -> dict[str, Any]:
        streams: dict[int, _TokenStream] = {}
        for chunk in chunks:
            if chunk.is_first:
                streams[chunk.stream] = self._stream(f"stream_{chunk.stream}")
            streams[chunk.stream].add(chunk, self.content.bos_tokens)
        offsets, together = self._writer("offsets", np.int64), self._stream("tokens")
        offsets.append(0)
        for _, stream in sorted(streams.items()):
            together.take(stream)
            offsets.append(together.tokens.length)
        return {**together.close(), "offsets": offsets.close()}

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
            original = part.text if part.original is None else part.original
            counter.add(original)
            if begins and join is not None:
                domain = self.domains.setdefault(part.domain, len(self.domains))
                if domain == len(self.joined_counters):
                    self.joined_counters.append(TextCounter(self.request.word_separator))
                else:
                    self.joined_counters[domain].add(join)
                    yield domain, join, False
            num_chars += len(part.text)
            if join is not None:
                self.joined_counters[domain].add(original)
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

    def _stream(self, name: str) -> "_TokenStream":
        return _TokenStream(self.folder, name, token_dtype(self.request))


class _TokenStream:
    """The tokens of a stream, with the bytes and words of its text that each stands for.

    Args:
        folder: where its arrays are written.
        name: name of the array of tokens.
        dtype: of the tokens.
    """

    def __init__(self, folder: Path, name: str, dtype: Any) -> None:
        self.tokens = ArrayWriter(folder / f"{name}.bin", dtype)
        self._sizes = [ArrayWriter(folder / f"{name}_{what}.bin", np.uint32) for what in ("bytes", "words")]
        self._is_measured = True
        # Text without a token belongs to the next one of its document, or to the last: that is held back.
        self._held = np.zeros((2, 0), dtype=np.int64)
        self._without_token = np.zeros(2, dtype=np.int64)

    def add(self, chunk: EncodedChunk, bos_tokens: Sequence[int]) -> None:
        """Append a chunk, BOS before a document's first."""
        ids, sizes = chunk.ids, chunk.sizes
        if chunk.is_first:
            ids = np.concatenate([np.asarray(bos_tokens, dtype=np.int64), ids])
        self.tokens.extend(ids)
        if sizes is None:
            self._is_measured = False
        if not self._is_measured:
            return
        assert sizes is not None
        if chunk.is_first:
            self._extend(np.zeros((2, len(bos_tokens)), dtype=np.int64))
        sizes, self._without_token = sizes[:, :-1].copy(), self._without_token + sizes[:, -1]
        if sizes.shape[1]:
            sizes[:, 0] += self._without_token
            self._without_token[:] = 0
        sizes = np.concatenate([self._held, sizes], axis=1)
        self._held = sizes[:, -1:]
        self._extend(sizes[:, :-1])
        if chunk.is_last:
            self._extend(self._held + self._without_token[:, None])
            self._held = self._held[:, :0]
            self._without_token[:] = 0

    def take(self, other: "_TokenStream") -> None:
        """Append another stream, whose files go."""
        self.tokens.take(other.tokens)
        self._is_measured = self._is_measured and other._is_measured
        for own, taken in zip(self._sizes, other._sizes, strict=True):
            own.take(taken)

    def close(self) -> dict[str, Any]:
        """Describe the arrays."""
        arrays = {"tokens": self.tokens.close()}
        for name, sizes in zip(("token_bytes", "token_words"), self._sizes, strict=True):
            if self._is_measured:
                arrays[name] = sizes.close()
            else:
                sizes.path.unlink()
        return arrays

    def _extend(self, sizes: npt.NDArray[np.int64]) -> None:
        for writer, values in zip(self._sizes, sizes, strict=True):
            writer.extend(values)


def token_dtype(request: EncodeRequest) -> Any:
    """Return the smallest unsigned type that holds the vocabulary."""
    return np.uint16 if request.encoder.vocab_size <= 1 << 16 else np.uint32
