"""The token stream of a run: made once per node, memory-mapped by every rank of it.

    <cache>/<key>/            arrays, named by content and request; sources of equal content share them
    <cache>/views/<key>.json  what one run sees: its folder of arrays, its fingerprint, its notes

Notes are kept in the view, so that no run reads those of another that shares its arrays.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.data import array_cache
from ppl_eval.data.sources import ALL, Content, EncodeRequest, Source, check_source

# Part of every key: raise it when the files, the notes or the way a text is encoded change.
_FORMAT = 7
# Ids that are looked at together.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class TokenData:
    """All tokens of a run, back to back, with the figures of the text they came from.

    Attributes:
        tokens: token ids of all documents; a memory map of uint16, uint32 or what the user's token file has.
        offsets_D1: document d is ``tokens[offsets_D1[d]:offsets_D1[d + 1]]``; int64 [D + 1]. A join makes one
            document of each domain.
        num_bytes_D: UTF-8 bytes of the original text of each document, which may be another than the text
            that was tokenised (a detokenised corpus); of joined documents with the joins. int64 [D]; None
            where the text is not known.
        num_words_D: words of the original text of each document; int64 [D], or None.
        token_bytes: UTF-8 bytes of the tokenised text that each token stands for; those of a document add up
            to its text. uint32, like ``tokens``; None where the tokenizer cannot say.
        token_words: how many words begin in each token behind the document's first; uint32, or None.
        highest_id: the highest id in ``tokens``; None where it was not looked for.
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
    token_bytes: npt.NDArray[np.uint32] | None = None
    token_words: npt.NDArray[np.uint32] | None = None
    highest_id: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""
        return int(self.offsets_D1[-1])

    def first_id_beyond(self, vocab_size: int) -> tuple[int, int, int] | None:
        """Return document, position in it, and id of the first token whose id is ``vocab_size`` or more; None
        where there is none, which costs nothing.
        """
        if self.highest_id is not None and self.highest_id < vocab_size:
            return None
        for begin in range(0, self.num_tokens, _BLOCK):
            beyond = np.flatnonzero(self.tokens[begin : begin + _BLOCK] >= vocab_size)
            if len(beyond):
                at = begin + int(beyond[0])
                document = int(np.searchsorted(self.offsets_D1, at, side="right")) - 1
                return document, at - int(self.offsets_D1[document]), int(self.tokens[at])
        return None


def prepare_tokens(source: Source, request: EncodeRequest, cache: Path) -> Path:
    """Make the token files of a source, unless the cache holds them already. To be called by one process of a
    node.

    Args:
        source: what a factory of ``ppl_eval.data`` returned, or a class of a user's with the same interface.
        request: how to encode it.
        cache: folder of all token caches.

    Returns:
        The file to give to ``open_tokens``.

    Raises:
        ValueError: if the source has no text, is damaged, or is no source.
    """
    source = check_source(source)
    kind = f"{type(source).__module__}.{type(source).__qualname__}"
    asked = {"source": [kind, source.name, source.parameters], "request": request.key()}
    stamp = source.stamp()
    view = _view(cache, {**asked, "stamp": stamp})
    if stamp is not None and _is_whole(view, cache):
        return view
    content = source.identify(request)
    fingerprint = _fingerprint(content, request)
    key = _key({"kind": kind, **fingerprint, "request": request.key(), "places": content.places})

    def write(empty: Path) -> dict[str, Any]:
        written = source.write(empty, request, content)
        tokens = array_cache.open_array(empty, written.arrays["tokens"])
        # Once, because every run of these arrays holds it against its model's vocabulary.
        return {**asdict(written), "highest_id": _highest(tokens)}

    folder = array_cache.build_once(cache, key, write)
    if stamp is None:
        view = _view(cache, {**asked, "folder": folder.name, "notes": content.notes})
    view.parent.mkdir(exist_ok=True)
    array_cache.write_checked(
        view, {"folder": folder.name, "fingerprint": fingerprint, "notes": content.notes}
    )
    return view


def open_tokens(view: Path) -> TokenData:
    """Map the files that ``prepare_tokens`` made.

    Raises:
        ValueError: if one of them is gone or damaged.
    """
    seen = array_cache.read_checked(view)
    cache = view.parent.parent
    about = None if seen is None else array_cache.read_checked(cache / seen["folder"] / array_cache.ABOUT)
    if seen is None or about is None:
        raise ValueError(f"files of the token cache that {view} names are gone; run again to make them anew")
    folder = cache / seen["folder"]
    arrays = {
        name: array_cache.open_array(folder, description) for name, description in about["arrays"].items()
    }
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
        token_bytes=arrays.get("token_bytes"),
        token_words=arrays.get("token_words"),
        highest_id=about["highest_id"],
    )


def _highest(tokens: npt.NDArray[Any]) -> int | None:
    return max(
        (int(tokens[begin : begin + _BLOCK].max()) for begin in range(0, len(tokens), _BLOCK)), default=None
    )


def _fingerprint(content: Content, request: EncodeRequest) -> dict[str, Any]:
    return {
        **content.facts,
        "tokenizer_sha256": request.encoder.sha256,
        "special_tokens": request.encoder.special_tokens,
        "join": request.join,
        "bos_tokens": list(content.bos_tokens),
    }


def _view(cache: Path, facts: dict[str, Any]) -> Path:
    return cache / "views" / f"{_key(facts)}.json"


def _key(facts: dict[str, Any]) -> str:
    return array_cache.key_of({"format": _FORMAT, **facts})


def _is_whole(view: Path, cache: Path) -> bool:
    seen = array_cache.read_checked(view)
    return seen is not None and array_cache.is_whole(cache / seen["folder"])
