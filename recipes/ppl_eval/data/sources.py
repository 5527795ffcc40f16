"""What every source of data is: an interface, so that whoever adds a form of data changes nothing else.

A source says what it holds (``identify``), and writes it as arrays when the cache does not have them
(``write``). ``token_data.prepare_tokens`` does the rest for every source alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ppl_eval.tokenization.tokenizer import TextEncoder

# The domain of sources that name none.
ALL = "all"


@dataclass(frozen=True)
class EncodeRequest:
    """How a run wants its data encoded.

    Attributes:
        encoder: the tokenizer.
        join: text between documents, all of which become one stream a domain; None keeps every document on
            its own.
        bos: BOS policy for the head of each stream or document.
        word_separator: how words are counted, see ``word_count.TextCounter``.
    """

    encoder: TextEncoder
    join: str | None = None
    bos: str = "never"
    word_separator: str = "white_space"

    def key(self) -> dict[str, Any]:
        """Return everything in the request that may change tokens or notes, as JSON values."""
        encoder = self.encoder
        return {
            "tokenizer": [encoder.sha256, encoder.vocab_size, encoder.bos_id, encoder.eos_id],
            "adds_bos": encoder.adds_bos,
            "special_tokens": encoder.special_tokens,
            "join": self.join,
            "bos": self.bos,
            "word_separator": self.word_separator,
        }


@dataclass(frozen=True)
class Content:
    """What a source holds, as one pass over it found.

    Attributes:
        facts: hashes that identify the data, whatever form it has: equal facts and an equal request give
            equal arrays. They go into the result as ``dataset.fingerprint``.
        notes: what a reader of the result must know about this source in this run. They are kept for the run
            (its request and its source), never with the arrays, which sources of equal content share.
        bos_tokens: ids that the source puts before each stream or document.
        places: what else decides which files ``write`` makes, such as where a file lies that is mapped and
            not copied; not in the fingerprint.
    """

    facts: dict[str, str]
    notes: tuple[str, ...] = ()
    bos_tokens: tuple[int, ...] = ()
    places: Any = None


@dataclass(frozen=True)
class Written:
    """What ``write`` put into a folder.

    Attributes:
        arrays: name of an array to its description by ``ArrayWriter.close``: ``tokens`` and ``offsets`` (see
            ``TokenData``), and where the source has them ``num_bytes``, ``num_words``, ``labels`` and
            ``domain``.
        domains: names of the domains, in the order of ``domain``'s numbers.
        num_documents: documents that hold something, before any join.
        notes: only what follows from content and request and nothing else, because sources of equal content
            share it.
    """

    arrays: dict[str, dict[str, Any]]
    domains: list[str]
    num_documents: int
    notes: list[str]


class Source(Protocol):
    """A source of documents; any class with these members is one.

    Attributes:
        name: the name of its factory, for the result.
        parameters: what the factory was called with, for the result; JSON values.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def parameters(self) -> dict[str, Any]: ...  # noqa: D102

    def stamp(self) -> Any:
        """Return something cheap (JSON values) that cannot stay the same when the content changes.

        Data that was identified under the same stamp is not read again. None where there is no such thing.
        """

    def identify(self, request: EncodeRequest) -> Content:
        """Read everything once and say what it is.

        Raises:
            ValueError: if the data is damaged, or the request cannot be fulfilled with it.
        """

    def write(self, folder: Path, request: EncodeRequest, content: Content) -> Written:
        """Write the arrays into an empty folder.

        Args:
            folder: the folder.
            request: how to encode.
            content: what ``identify`` returned for this request.

        Raises:
            ValueError: if the data is no longer ``content``, or there is nothing to score.
        """

    def merge(self, sources: Mapping[str, Any]) -> "Source":
        """Return one source of several of this class, each a domain; name of a domain to its source.

        Raises:
            ValueError: if they do not go together.
        """


_MEMBERS = ("name", "parameters", "stamp", "identify", "write", "merge")


def check_source(value: Any, key: str = "dataset") -> Source:
    """Return ``value`` if it is a source.

    Raises:
        ValueError: if not; names the members that it lacks.
    """
    missing = [member for member in _MEMBERS if not hasattr(value, member)]
    if missing:
        raise ValueError(
            f"{key}: its _component_ returned {type(value).__name__}, which is no source of data (it has no "
            f"{', '.join(missing)}); use a component of ppl_eval.data. A torchtune dataset goes into "
            "ppl_eval.data.sft"
        )
    return value


def domains(sources: Mapping[str, Any]) -> Source:
    """Several sources, each a domain with figures of its own. A protocol that joins documents joins inside a
    domain.

    Args:
        sources: name of a domain to the section of its source, each with a ``_component_``; all of one kind
            (text, token files or samples).

    Raises:
        ValueError: if a section is no source, or the kinds differ.
    """
    if not sources:
        raise ValueError("dataset.sources is empty; give a mapping of a domain's name to its source")
    built = {name: _build(f"dataset.sources.{name}", section) for name, section in sources.items()}
    if len({type(source) for source in built.values()}) > 1:
        kinds = ", ".join(f"{name}: {type(source).__name__}" for name, source in built.items())
        raise ValueError(f"dataset.sources mixes kinds of sources ({kinds}); one run takes one kind")
    return next(iter(built.values())).merge(built)


def _build(key: str, section: Any) -> Source:
    from omegaconf import OmegaConf

    from ppl_eval.config.components import instantiate

    if not isinstance(section, Mapping) or "_component_" not in section:
        raise ValueError(
            f"{key} is {section!r}; it must be a section with a _component_, such as ppl_eval.data.text_files"
        )
    return check_source(instantiate(key, OmegaConf.create(dict(section))), key)
