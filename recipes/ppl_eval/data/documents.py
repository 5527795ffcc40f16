"""Documents of text in parts, and the hash that identifies them."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ppl_eval.data.sources import ALL


class Part(NamedTuple):
    """A part of a document, so that a document larger than memory can be read.

    Attributes:
        text: what is scored.
        is_last: whether it ends its document.
        domain: name of the document's domain.
        original: the text whose bytes and words count, where that is not the text that is scored (a
            detokenised corpus); None where it is.
    """

    text: str
    is_last: bool = True
    domain: str = ALL
    original: str | None = None


def documents_of(parts: Iterable[Part]) -> Iterator[str]:
    """Join parts to whole documents."""
    together: list[str] = []
    for part in parts:
        together.append(part.text)
        if part.is_last:
            yield "".join(together)
            together = []


class TextDigest:
    """A hash over documents and where they end, which does not depend on the form they were stored in.

    Empty documents count: where documents are joined, each adds a join.
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
        """Return what identifies the text: one hash, and one of the domains where there are any."""
        facts = {"text_sha256": self._documents.hexdigest()}
        return facts | {"domains_sha256": self._domains.hexdigest()} if self._has_domains else facts


def digest_of(parts: Iterable[Part]) -> dict[str, str]:
    """Return the hashes of documents; see ``TextDigest``."""
    digest = TextDigest()
    for part in parts:
        digest.add(part)
    return digest.facts()
