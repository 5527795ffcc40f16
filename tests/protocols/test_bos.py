"""BOS: once where the protocol wants it, never twice, and a note where it is missing."""

import pytest

from helpers.windows import BOS, EOS, encoder, token_data
from ppl_eval import protocols
from ppl_eval.protocols.base import Protocol
from ppl_eval.protocols.bos import check_bos_tokens, prefix_token


def test_the_prefix_token():
    assert prefix_token(protocols.rolling(4), encoder()) == BOS
    assert prefix_token(protocols.rolling(4), encoder(bos_id=None)) == EOS
    assert prefix_token(protocols.disjoint(4), encoder()) is None
    assert prefix_token(protocols.disjoint(4, bos="each_window"), encoder()) == BOS
    with pytest.raises(ValueError, match="puts BOS or EOS before its windows, but this tokenizer has none"):
        prefix_token(protocols.rolling(4), encoder(bos_id=None, eos_id=None))
    with pytest.raises(ValueError, match="puts BOS before its windows"):
        prefix_token(protocols.disjoint(4, bos="each_window"), encoder(bos_id=None))


def test_each_window_leaves_bos_to_the_windows():
    assert encoder(adds_bos=True).bos_tokens("each_window") == []
    assert encoder(adds_bos=True).bos_tokens("tokenizer") == [BOS]


@pytest.mark.parametrize(
    ("protocol", "documents"),
    [
        # BOS in the tokens and again by the protocol; the empty document before it is no trouble.
        (protocols.rolling(4), [[7, 7], [], [BOS, 8, 9]]),
        (protocols.disjoint(4, bos="each_window"), [[7], [BOS, 8, 9, 10]]),
        # In the tokens twice: BOS in the text, and BOS by the tokenizer.
        (protocols.disjoint(4), [[7], [BOS, BOS, 8, 9]]),
    ],
)
def test_double_bos_is_refused(protocol: Protocol, documents: list[list[int]]):
    with pytest.raises(
        ValueError, match=rf"document {len(documents) - 1} would begin with BOS \(id 1\) twice"
    ):
        check_bos_tokens(protocol, token_data(*documents), encoder(adds_bos=True))


def test_no_advice_is_what_is_set_already():
    def advice(protocol: Protocol, *documents: list[int]) -> str:
        with pytest.raises(ValueError, match="twice") as caught:
            check_bos_tokens(protocol, token_data(*documents), encoder(adds_bos=True))
        return str(caught.value)

    for bos in ("never", "each_window"):
        said = advice(protocols.rolling(4, bos=bos), [BOS, 8, 9])
        assert "bos=never, or" not in said
        assert "take BOS out of the data (protocol.special_tokens=text spells" in said
        assert "rolling always puts it there" in said
    assert "use protocol.bos=never" in advice(protocols.disjoint(4), [BOS, BOS, 8])
    said = advice(protocols.disjoint(4, bos="never", special_tokens="text"), [BOS, BOS, 8])
    assert said.endswith("take BOS out of the data")
    for protocol, other in (
        (protocols.rolling(4), "another protocol"),
        (protocols.llama_cpp(4), "protocol.bos=never"),
    ):
        with pytest.raises(ValueError, match=f"or use {other}$"):
            prefix_token(protocol, encoder(bos_id=None, eos_id=None))


def test_one_bos_is_fine_and_none_is_said():
    model_with_bos = encoder(adds_bos=True)
    assert check_bos_tokens(protocols.disjoint(4), token_data([BOS, 8, 9]), model_with_bos) == []
    # llama.cpp's BOS takes the place of the one at the head.
    assert check_bos_tokens(protocols.llama_cpp(4), token_data([BOS, 8, 9, 10]), model_with_bos) == []
    assert check_bos_tokens(protocols.rolling(4), token_data([8, 9]), model_with_bos) == []
    # A document of one BOS, and the next begins with BOS too: not twice in one.
    assert check_bos_tokens(protocols.disjoint(4), token_data([BOS], [BOS, 9]), model_with_bos) == []
    notes = check_bos_tokens(protocols.disjoint(4, bos="never"), token_data([8, 9]), model_with_bos)
    assert len(notes) == 1
    assert "nothing here begins with it" in notes[0]
    assert "protocol.bos=tokenizer or each_window gives it BOS (now never)" in notes[0]
    # Tokens that were given without BOS, not made from text.
    notes = check_bos_tokens(protocols.disjoint(4), token_data([8, 9]), model_with_bos)
    assert "protocol.bos=each_window gives it BOS" in notes[0]
    assert check_bos_tokens(protocols.disjoint(4, bos="never"), token_data([8, 9]), encoder()) == []
