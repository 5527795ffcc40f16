"""The token stream of a run: made once per node, memory-mapped by every rank of it."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.data import array_store as stores
from ppl_eval.data.samples import IGNORE_INDEX, SampleSource, write_samples
from ppl_eval.data.sources import ALL, TextSource
from ppl_eval.data.token_sources import TokenSource, inspect_token_files, write_token_files
from ppl_eval.data.tokenize import digest_of, write_text_tokens
from ppl_eval.tokenization.tokenizer import TextEncoder
from ppl_eval.tokenization.word_count import count_words

# Part of the cache key: raise it when the files or the way a text is encoded change.
_FORMAT = 3
# A file that changed this short a time ago may change again without its time of change showing it.
_RACY_NS = 2 * 10**9


@dataclass(frozen=True)
class TokenData:
    """All tokens of a run, back to back, with the figures of the text they came from.

    Attributes:
        tokens: token ids of all documents; a memory map of uint16, uint32 or what the user's token file has.
        offsets_D1: document d is ``tokens[offsets_D1[d]:offsets_D1[d + 1]]``; int64 [D + 1]. A join makes one
            document of each domain.
        num_bytes_D: UTF-8 bytes of the original text of each document, text between joined ones not counted;
            int64 [D]. None where the text is not known.
        num_words_D: words of each document; int64 [D], or None.
        num_documents: documents of the source that hold text, before any join.
        fingerprint: what identifies the data: hashes of text and tokenizer, and how it was encoded.
        notes: what a reader of the result must know (empty documents, adjusted values).
        labels: ``tokens`` with -100 where a token is never a scored target (not shifted); None where every
            token may be scored.
        domains: names of the domains.
        domain_D: index of each document's domain; int32 [D]. None where there is one domain.
    """

    tokens: npt.NDArray[Any]
    offsets_D1: npt.NDArray[np.int64]
    num_bytes_D: npt.NDArray[np.int64] | None
    num_words_D: npt.NDArray[np.int64] | None
    num_documents: int
    fingerprint: dict[str, Any]
    notes: tuple[str, ...] = ()
    labels: npt.NDArray[np.int32] | None = None
    domains: tuple[str, ...] = (ALL,)
    domain_D: npt.NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        return int(self.offsets_D1[-1])


def prepare_tokens(
    source: Any,
    encoder: TextEncoder,
    join: str | None,
    bos: str,
    cache: Path,
    word_separator: str = "white_space",
) -> Path:
    """Make the token files of a source, unless the cache holds them already. To be called by one process of a
    node.

    Args:
        source: what a factory of ``ppl_eval.data`` returned.
        encoder: the tokenizer.
        join: text between documents, all of which become one stream a domain; None keeps every document on
            its own.
        bos: BOS policy for the head of each stream or document.
        cache: folder of all token caches.
        word_separator: how words are counted, see ``words``.

    Returns:
        The file to give to ``open_tokens``.

    Raises:
        ValueError: if the source has no text, is damaged, or is no source.
    """
    if not isinstance(source, TextSource | TokenSource | SampleSource):
        raise ValueError(
            f"dataset: its _component_ returned {type(source).__name__}, which is no source of this tool; "
            "use a "
            "component of ppl_eval.data. A torchtune dataset goes into ppl_eval.data.sft"
        )
    encode_facts = {
        "tokenizer_sha256": encoder.sha256,
        "join": join,
        "bos_tokens": encoder.bos_tokens(bos) if isinstance(source, TextSource) else [],
    }
    # What else makes other files, though not other tokens.
    key_facts = {"format": _FORMAT, "word_separator": word_separator}
    request = {"name": source.name, **source.parameters, **encode_facts, **key_facts, "bos": bos}
    if isinstance(source, SampleSource):
        # What a torchtune dataset holds is known only after it was made.
        samples = partial(write_samples, source=source, encoder=encoder, join=join, bos=bos)
        folder = stores.build_anew(cache, stores.key_of(request), samples)
        content = stores.read_json(folder / stores.ABOUT)["content"]
        view = _view(cache, {**request, **content})
        stores.write_json(
            view, {"folder": folder.name, "fingerprint": {**content, **encode_facts}, "notes": []}
        )
        return view
    stamp = _settled(source.stamp() if source.stamp is not None else None)
    if stamp is not None:
        view = _view(cache, {**request, "stamp": stamp})
        known = stores.read_json(view)
        if known is not None and (cache / known["folder"] / stores.ABOUT).is_file():
            return view
    if isinstance(source, TextSource):
        content, notes = digest_of(source)
        fingerprint = {**content, **encode_facts}
        key = stores.key_of({**fingerprint, **key_facts})
        write = partial(
            write_text_tokens,
            source=source,
            encoder=encoder,
            join=join,
            bos_tokens=encoder.bos_tokens(bos),
            word_separator=word_separator,
            expected=content,
        )
    else:
        content, notes = inspect_token_files(source, encoder, bos)
        fingerprint = {**content, **encode_facts}
        # The folder holds the files' own places, not copies.
        key = stores.key_of({**fingerprint, **key_facts, "files": source.stamp()})
        write = partial(write_token_files, source=source, encoder=encoder, join=join)
    folder = stores.build_once(cache, key, write)
    # Sources of one content share a folder, but each has notes of its own. Without a stamp, only its content
    # names a source.
    view = _view(cache, {**request, **(content if stamp is None else {"stamp": stamp})})
    stores.write_json(view, {"folder": folder.name, "fingerprint": fingerprint, "notes": notes})
    return view


def open_tokens(view: Path) -> TokenData:
    """Map the files that ``prepare_tokens`` made.

    Raises:
        ValueError: if one of them is gone or damaged.
    """
    seen = stores.read_json(view)
    about = None if seen is None else stores.read_json(view.parent.parent / seen["folder"] / stores.ABOUT)
    if seen is None or about is None:
        raise ValueError(f"the token cache lost what {view} speaks of; run again to make it anew")
    folder = view.parent.parent / seen["folder"]
    arrays = {name: stores.open_array(folder, description) for name, description in about["arrays"].items()}
    return TokenData(
        tokens=arrays["tokens"],
        offsets_D1=arrays["offsets"],
        num_bytes_D=arrays.get("num_bytes"),
        num_words_D=arrays.get("num_words"),
        num_documents=about["num_documents"],
        fingerprint=seen["fingerprint"],
        notes=(*seen["notes"], *about["notes"]),
        labels=arrays.get("labels"),
        domains=tuple(about["domains"]),
        domain_D=arrays["domain"] if len(about["domains"]) > 1 else None,
    )


def _view(cache: Path, request: dict[str, Any]) -> Path:
    return cache / "views" / f"{stores.key_of(request)}.json"


def _settled(stamp: Any) -> Any:
    """The stamp, or None where it is too young to be trusted."""
    newest = _newest(stamp)
    return None if newest is not None and time.time_ns() - newest < _RACY_NS else stamp


def _newest(stamp: Any) -> int | None:
    if isinstance(stamp, dict):
        stamp = list(stamp.values())
    if isinstance(stamp, tuple):
        return int(stamp[-1])
    found = [newest for part in stamp or [] if (newest := _newest(part)) is not None]
    return max(found, default=None)


__all__ = ["IGNORE_INDEX", "TokenData", "count_words", "open_tokens", "prepare_tokens"]
