"""BOS where a protocol wants it, once, and never twice."""

from collections.abc import Iterator

import numpy as np

from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols.base import IntArray, Protocol
from ppl_eval.tokenization.tokenizer import TextEncoder

# Documents whose first tokens are looked at together, so that memory stays flat.
_CHUNK = 1 << 18


def prefix_token(protocol: Protocol, encoder: TextEncoder) -> int | None:
    """Id of the token that goes before windows with a prefix; None where none has one.

    Raises:
        ValueError: if the protocol wants a token that the tokenizer does not have.
    """
    if protocol.prefix_rule is None:
        return None
    for token in [encoder.bos_id] if protocol.prefix_rule == "bos" else [encoder.bos_id, encoder.eos_id]:
        if token is not None:
            return token
    wanted = "BOS" if protocol.prefix_rule == "bos" else "BOS or EOS"
    other = "protocol.bos=never" if protocol.prefix_rule == "bos" else "another protocol"
    raise ValueError(
        f"the protocol {protocol.name} with protocol.bos={protocol.bos} puts {wanted} before its windows, "
        "but this tokenizer has none; name its special tokens (bos_token, eos_token) in the tokenizer's "
        f"configuration, or use {other}"
    )


def check_bos_tokens(protocol: Protocol, data: TokenData, encoder: TextEncoder) -> list[str]:
    """Refuse double BOS, and say where BOS is missing.

    Args:
        protocol: as ``Protocol.for_tokenizer`` returned it.
        data: the tokens to be scored, BOS at their heads included.
        encoder: the tokenizer.

    Returns:
        Notes for the result: at most one line.

    Raises:
        ValueError: if a document would be seen with BOS twice at its head.
    """
    bos = encoder.bos_id
    if bos is None:
        return []
    prefix = prefix_token(protocol, encoder)
    any_bos = prefix == bos
    for document, length, head_K2 in _heads(data):
        begins_with_bos = head_K2[:, 0] == bos
        any_bos |= bool(begins_with_bos.any())
        twice = begins_with_bos & (head_K2[:, 1] == bos) & (length > 1)
        if prefix == bos:
            start, _, _, has_prefix = protocol.locate(length, np.zeros_like(length))
            twice |= begins_with_bos & has_prefix & (start == 0)
        if twice.any():
            first = int(document[twice.argmax()])
            raise ValueError(
                f"document {first} would begin with BOS (id {bos}) twice: its tokens begin with it already "
                f"(from the text, the dataset or protocol.bos={protocol.bos}), and one more is put there; "
                f"{_remedy(protocol)}"
            )
    if encoder.adds_bos and not any_bos:
        # Given tokens and samples are scored as they are, whatever the policy says about text.
        mend = "each_window" if protocol.bos in ("tokenizer", "always") else "tokenizer or each_window"
        return [
            "this model's tokenizer puts BOS first, but nothing here begins with it: expect a higher "
            f"perplexity; protocol.bos={mend} gives it BOS (now {protocol.bos})"
        ]
    return []


def _remedy(protocol: Protocol) -> str:
    always = protocol.prefix_rule == "bos_or_eos"
    if protocol.bos != "never" and not always:
        return "use protocol.bos=never, or take BOS out of the data"
    remedy = "take BOS out of the data"
    if protocol.special_tokens == "parse":
        remedy += " (protocol.special_tokens=text spells one that is in a text)"
    return remedy + (f", or use another protocol: {protocol.name} always puts it there" if always else "")


def _heads(data: TokenData) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    # Ids, lengths and first two tokens of the documents that have any.
    length_D = np.diff(data.offsets_D1)
    for first in range(0, len(length_D), _CHUNK):
        length = length_D[first : first + _CHUNK]
        document = first + np.flatnonzero(length)
        offset = np.asarray(data.offsets_D1[document])
        second = np.minimum(offset + 1, data.num_tokens - 1)
        yield (
            document,
            length_D[document],
            np.stack([data.tokens[offset], data.tokens[second]], axis=1).astype(np.int64),
        )
