"""Text to ids as picklable functions, so that worker processes can run any tokenizer. Imports no torch, so
that they stay small.

An ``Encoding`` also says what cutting a long text into chunks needs to know (see ``chunking``).

Names of special tokens in a text (``<|im_end|>``, ``</s>``) are parsed to their ids or spelled in letters, as
``special_tokens`` says, by every class of tokenizer alike: left to themselves some do this and some do that.
What is special is what a tokenizer.json or a SentencePiece model marks so (tokens that they only added are
always parsed) and the ``special_tokens`` of torchtune's classes.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ppl_eval.tokenization import text_spans
from ppl_eval.tokenization.cuttable import why_one_call
from ppl_eval.tokenization.text_spans import SpecialTokens, TextSpans, split_special

Ids = npt.NDArray[np.int64]
Encode = Callable[[str], Ids]

SPECIAL_TOKENS = ("parse", "text")


@dataclass(frozen=True)
class TokenizerClass:
    """What is known about one of torchtune's tokenizer classes.

    Attributes:
        kind: what encodes a text: ``sentencepiece``, which gets it as it is, ``tiktoken``, or
            ``byte_level``, a GPT-2 style encoder of torchtune's own.
        adds_bos: whether the published Hugging Face tokenizer puts BOS before a text by itself. torchtune's
            classes do not say: their ``encode`` has an argument for it.
        parses: whether the class's own ``encode`` parses names of special tokens.
    """

    kind: Literal["sentencepiece", "tiktoken", "byte_level"]
    adds_bos: bool
    parses: bool = False


TOKENIZER_CLASSES = {
    "Llama2Tokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "Llama3Tokenizer": TokenizerClass("tiktoken", adds_bos=True),
    "MistralTokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "GemmaTokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "Phi3MiniTokenizer": TokenizerClass("sentencepiece", adds_bos=False),
    "Phi4Tokenizer": TokenizerClass("byte_level", adds_bos=False),
    "Qwen2Tokenizer": TokenizerClass("byte_level", adds_bos=False, parses=True),
    "Qwen2_5Tokenizer": TokenizerClass("byte_level", adds_bos=False, parses=True),
}


@dataclass(frozen=True)
class Encoding:
    """How a tokenizer encodes.

    Attributes:
        encode: text to ids, no BOS and no EOS.
        cut_every: the tokenizer itself cuts a text after every so many characters and encodes the parts one
            by one; None if it does not.
        one_call: why a text must not be cut at all; None if it may be.
        spans: makes what is known about the text of its tokens; None where nothing is.
    """

    encode: Encode
    cut_every: int | None = None
    one_call: str | None = None
    spans: Callable[[], TextSpans] | None = None


def encode_hf(tokenizer: Any, spell: bool, text: str) -> Ids:
    """Encode with a ``tokenizers.Tokenizer``; ``spell`` special tokens in letters."""
    # Set at each call, because pickling loses it.
    tokenizer.encode_special_tokens = spell
    # The batch call, which makes no offsets, is 1.5 times as fast as `encode`.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded.ids, dtype=np.int64)


def encode_sentencepiece(processor: Any, text: str) -> Ids:
    """Encode with a ``SentencePieceProcessor``."""
    return np.array(processor.encode(text, add_bos=False, add_eos=False, out_type=int), dtype=np.int64)


def encode_parsed(encode: Encode, special: SpecialTokens, text: str) -> Ids:
    """Encode with special tokens parsed, by an encoder that spells them: what is between them one by one."""
    ids = dict(special)
    parts = [
        encode(part) if index % 2 == 0 else np.array([ids[part]], dtype=np.int64)
        for index, part in enumerate(split_special(special, text))
    ]
    return np.concatenate(parts)


@dataclass(frozen=True)
class TiktokenParts:
    """How torchtune cuts a text for tiktoken: parts of ``cut_every`` characters, and no run of white space or
    of anything else longer than ``longest_run`` in one call (tiktoken is quadratic in it).
    """

    cut_every: int
    longest_run: int


def encode_tiktoken(encoding: Any, parts: TiktokenParts, spell: bool, text: str) -> Ids:
    """Encode with a ``tiktoken.Encoding`` the way torchtune does; ``spell`` special tokens in letters."""
    cut_every, longest_run = parts.cut_every, parts.longest_run
    allowed: Any = set() if spell else "all"
    run = re.compile(rf"\s{{{longest_run + 1},}}|\S{{{longest_run + 1},}}")
    ids = []
    for begin in range(0, len(text), cut_every):
        part = text[begin : begin + cut_every]
        cuts = [0]
        for match in run.finditer(part):
            cuts += range(match.start() + longest_run, match.end(), longest_run)
        for start, stop in zip(cuts, [*cuts[1:], len(part)], strict=True):
            ids += encoding.encode(part[start:stop], allowed_special=allowed, disallowed_special=())
    return np.array(ids, dtype=np.int64)


def encode_torchtune(tokenizer: Any, spell: bool, text: str) -> Ids:
    """Encode with any torchtune tokenizer; ``spell`` special tokens in letters."""
    known = tokenizer_class(tokenizer)
    if known is not None and known.parses and spell:
        words = tokenizer._tokenize(unicodedata.normalize("NFC", text))
        return np.array([tokenizer._convert_token_to_id(word) for word in words], dtype=np.int64)
    if known is not None and not known.parses and not spell:
        return encode_parsed(partial(_encode_own, tokenizer), tuple(tokenizer.special_tokens.items()), text)
    return _encode_own(tokenizer, text)


def _encode_own(tokenizer: Any, text: str) -> Ids:
    return np.array(tokenizer.encode(text, add_bos=False, add_eos=False), dtype=np.int64)


def encode_configured(config: str, spell: bool, text: str) -> Ids:
    """Encode with the tokenizer that a config section (as JSON) builds, once per process; for tokenizers that
    cannot be pickled.
    """
    return encode_torchtune(_build(config), spell, text)


@lru_cache(maxsize=1)
def _build(config: str) -> Any:
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    return instantiate(OmegaConf.create(json.loads(config)))


def tokenizer_class(tokenizer: Any) -> TokenizerClass | None:
    """Return what is known about the class of a tokenizer; None for one that is not torchtune's."""
    kind = type(tokenizer)
    return TOKENIZER_CLASSES.get(kind.__name__) if kind.__module__.startswith("torchtune.") else None


def encoding_of(tokenizer: Any, config: Mapping[str, Any], special_tokens: str = "parse") -> Encoding:
    """Return the encoding of an instantiated torchtune tokenizer.

    Args:
        tokenizer: the component.
        config: the config section that built it.
        special_tokens: what becomes of names of special tokens in a text: one of ``SPECIAL_TOKENS``.

    Raises:
        ValueError: if the tokenizer cannot do that.
    """
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer, _tiktoken

    known = tokenizer_class(tokenizer)
    kind = known and known.kind
    spell = special_tokens == "text"
    if type(tokenizer) is HuggingFaceBaseTokenizer:
        return _encoding_of_hf(tokenizer.tokenizer, spell)
    if kind == "sentencepiece":
        return _encoding_of_sentencepiece(tokenizer, spell)
    if kind == "tiktoken" and type(tokenizer.tt_model) is _tiktoken.TikTokenBaseTokenizer:
        parts = TiktokenParts(_tiktoken.MAX_ENCODE_CHARS, _tiktoken.MAX_NO_WHITESPACE_CHARS)
        inner = tokenizer.tt_model.tt_model
        encode: Encode = partial(encode_tiktoken, inner, parts, spell)
        return Encoding(encode, cut_every=parts.cut_every, spans=partial(text_spans.spans_of_tiktoken, inner))
    spans = None
    if kind == "byte_level":
        vocab = getattr(tokenizer, "tokenizer_model", tokenizer).encoder
        spans = partial(text_spans.spans_of_byte_level, vocab, tokenizer.special_tokens)
    elif spell:
        raise ValueError(
            f"protocol.special_tokens is 'text', but what {type(tokenizer).__name__} does with special tokens"
            " in a text is its own and cannot be set; protocol.special_tokens=parse leaves it alone"
        )
    encode = partial(encode_torchtune, tokenizer, spell)
    if "_component_" in config:
        encode = partial(encode_configured, json.dumps(dict(config)), spell)
    unknown = f"nothing is known about cutting texts for {type(tokenizer).__name__}"
    return Encoding(encode, one_call=None if kind == "byte_level" else unknown, spans=spans)


def _encoding_of_hf(tokenizer: Any, spell: bool) -> Encoding:
    # A tokenizer.json may hold the length limit that it was trained with, which would drop text silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    description = json.loads(tokenizer.to_str())
    if spell:
        # The setting is the tokenizer's: data sets that use it as well must not see it.
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    spans = partial(text_spans.spans_of_hf, tokenizer, description, spell)
    return Encoding(partial(encode_hf, tokenizer, spell), one_call=why_one_call(description), spans=spans)


def _encoding_of_sentencepiece(tokenizer: Any, spell: bool) -> Encoding:
    processor = tokenizer._spm_model.spm_model
    encode: Encode = partial(encode_sentencepiece, processor)
    pieces = ((processor.id_to_piece(index), index) for index in range(processor.get_piece_size()))
    special = {
        piece: index for piece, index in pieces if processor.is_control(index) or processor.is_unknown(index)
    }
    special |= getattr(tokenizer, "special_tokens", {})
    named = () if spell else tuple(special.items())
    if named:
        encode = partial(encode_parsed, encode, named)
    spans = partial(text_spans.spans_of_sentencepiece, processor, named)
    return Encoding(encode, one_call=_why_one_call_sentencepiece(processor), spans=spans)


def _why_one_call_sentencepiece(processor: Any) -> str | None:
    import sentencepiece.sentencepiece_model_pb2 as protos

    model: Any = protos
    description = model.ModelProto.FromString(processor.serialized_model_proto())
    byte_pair_encoding = 2  # TrainerSpec.ModelType.BPE
    if description.trainer_spec.model_type != byte_pair_encoding:
        return "its SentencePiece model is not byte-pair encoding and weighs the whole text at once"
    return None
