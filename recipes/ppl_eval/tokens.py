"""Token streams on disk: written once per node, memory-mapped by every rank of it."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from ppl_eval.data import TextSource
from ppl_eval.tokenizer import TextEncoder

IGNORE_INDEX = -100

# Part of the cache key: raise it when the files or the way a text is encoded change.
_FORMAT = 1
_WHITE_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class TokenData:
    """All tokens of a run, back to back, with the figures of the text they came from.

    Attributes:
        tokens: token ids of all documents; a memory map of uint16 or uint32.
        offsets_D1: document d is ``tokens[offsets_D1[d]:offsets_D1[d + 1]]``; int64 [D + 1]. After a join
            there is one document.
        num_bytes_D: UTF-8 bytes of the text of each document; int64 [D].
        num_words_D: words of each document, as lm-eval counts them; int64 [D].
        num_documents: documents of the source that hold text, before any join.
        fingerprint: what identifies the data: hashes of text and tokenizer, and how it was encoded.
        notes: what a reader of the result must know (empty documents, adjusted values).
        labels: ``tokens`` with -100 where a token is never a scored target (not shifted); None where every
            token may be scored.
        domains: names of the domains; one where nobody named any.
        domain_D: index of each document's domain; int32. None where there is one.
    """

    tokens: npt.NDArray[Any]
    offsets_D1: npt.NDArray[np.int64]
    num_bytes_D: npt.NDArray[np.int64]
    num_words_D: npt.NDArray[np.int64]
    num_documents: int
    fingerprint: dict[str, Any]
    notes: tuple[str, ...] = ()
    labels: npt.NDArray[np.int32] | None = None
    domains: tuple[str, ...] = ("all",)
    domain_D: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        return int(self.offsets_D1[-1])


def count_words(text: str, separator: str = "white_space") -> int:
    """Words of a text.

    Args:
        text: the text.
        separator: ``white_space`` counts as lm-eval does for word perplexity, pieces between runs of white
            space, empty ones at the ends included; ``space`` as Megatron-LM does, pieces between single
            spaces after white space at the ends is gone.
    """
    return len(_WHITE_SPACE.split(text) if separator == "white_space" else text.strip().split(" "))


def prepare_tokens(
    source: TextSource,
    encoder: TextEncoder,
    join: str | None,
    bos: str,
    cache: Path,
    word_separator: str = "white_space",
) -> Path:
    """Tokenise a source, unless the cache holds its tokens already. To be called by one process of a node.

    Args:
        source: documents.
        encoder: the tokenizer.
        join: text between documents, all of which become one stream; None keeps every document on its own.
        bos: BOS policy for the head of each stream or document.
        cache: folder of all token caches.
        word_separator: how words are counted (see ``count_words``).

    Returns:
        The folder to give to ``open_tokens``.

    Raises:
        ValueError: if the source has no text, or its text no tokens.
    """
    text_sha256 = hash_documents(source.read())
    fingerprint = {
        "text_sha256": text_sha256,
        "tokenizer_sha256": encoder.sha256,
        "join": join,
        "bos_tokens": encoder.bos_tokens(bos),
        "word_separator": word_separator,
        "format": _FORMAT,
    }
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache / key
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Two jobs may start together; the second one waits, then finds the folder. The lock dies with its
    # process.
    with FileLock(cache / f"{key}.lock"):
        if not folder.is_dir():
            half = cache / f"{key}.half"
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir()
            _write(half, source, encoder, join, fingerprint)
            half.rename(folder)
    return folder


def hash_documents(documents: Iterator[str]) -> str:
    """A sha256 over the documents and where they end."""
    digest = hashlib.sha256()
    for text in documents:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _write(
    folder: Path, source: TextSource, encoder: TextEncoder, join: str | None, fingerprint: dict[str, Any]
) -> None:
    bos_tokens = fingerprint["bos_tokens"]
    texts = list(source.read())
    full = [text for text in texts if text]
    if not full:
        raise ValueError(
            f"the dataset {source.name} ({source.parameters}) has no text: {len(texts)} documents, all of"
            " them empty"
        )
    notes = (
        [f"{len(texts) - len(full)} of {len(texts)} documents are empty; they score nothing"]
        if len(full) < len(texts)
        else []
    )
    documents = full if join is None else [join.join(full)]
    dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
    offsets = [0]
    with open(folder / "tokens.bin", "wb") as file:
        for text in documents:
            tokens = np.concatenate([bos_tokens, encoder.encode(text)]).astype(dtype)
            file.write(tokens.tobytes())
            offsets.append(offsets[-1] + len(tokens))
        file.flush()
        os.fsync(file.fileno())
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    np.save(folder / "num_bytes.npy", np.array([len(text.encode()) for text in documents], dtype=np.int64))
    num_words = [count_words(text, fingerprint["word_separator"]) for text in documents]
    np.save(folder / "num_words.npy", np.array(num_words, dtype=np.int64))
    about = {
        "fingerprint": fingerprint,
        "num_documents": len(full),
        "dtype": np.dtype(dtype).name,
        "notes": notes,
    }
    (folder / "about.json").write_text(json.dumps(about))


def open_tokens(folder: Path) -> TokenData:
    """Map the files that ``prepare_tokens`` wrote."""
    about = json.loads((folder / "about.json").read_text())
    return TokenData(
        tokens=np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r"),
        offsets_D1=np.load(folder / "offsets.npy", mmap_mode="r"),
        num_bytes_D=np.load(folder / "num_bytes.npy", mmap_mode="r"),
        num_words_D=np.load(folder / "num_words.npy", mmap_mode="r"),
        num_documents=about["num_documents"],
        fingerprint=about["fingerprint"],
        notes=tuple(about["notes"]),
    )
