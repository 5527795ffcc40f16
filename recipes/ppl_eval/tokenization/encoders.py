"""Text to ids as picklable functions, so that worker processes can run any tokenizer. Imports no torch, so
that they stay small.

An ``Encoding`` also says what cutting a long text into chunks needs to know (see ``chunking``).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ppl_eval.tokenization import text_spans
from ppl_eval.tokenization.cuttable import why_one_call
from ppl_eval.tokenization.text_spans import TextSpans

Ids = npt.NDArray[np.int64]
Encode = Callable[[str], Ids]


@dataclass(frozen=True)
class TokenizerClass:
    """What is known about one of torchtune's tokenizer classes.

    Attributes:
        kind: what encodes a text: ``sentencepiece``, which gets it as it is, ``tiktoken``, or
            ``byte_level``, a GPT-2 style encoder of torchtune's own.
        adds_bos: whether the published Hugging Face tokenizer puts BOS before a text by itself. torchtune's
            classes do not say: their ``encode`` has an argument for it.
    """

    kind: Literal["sentencepiece", "tiktoken", "byte_level"]
    adds_bos: bool


TOKENIZER_CLASSES = {
    "Llama2Tokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "Llama3Tokenizer": TokenizerClass("tiktoken", adds_bos=True),
    "MistralTokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "GemmaTokenizer": TokenizerClass("sentencepiece", adds_bos=True),
    "Phi3MiniTokenizer": TokenizerClass("sentencepiece", adds_bos=False),
    "Phi4Tokenizer": TokenizerClass("byte_level", adds_bos=False),
    "Qwen2Tokenizer": TokenizerClass("byte_level", adds_bos=False),
    "Qwen2_5Tokenizer": TokenizerClass("byte_level", adds_bos=False),
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


def encode_hf(tokenizer: Any, text: str) -> Ids:
    """Encode with a ``tokenizers.Tokenizer``."""
    # The batch call, which makes no offsets, is 1.5 times as fast as `encode`.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoded.ids, dtype=np.int64)


def encode_sentencepiece(processor: Any, text: str) -> Ids:
    """Encode with a ``SentencePieceProcessor``."""
    return np.array(processor.encode(text, add_bos=False, add_eos=False, out_type=int), dtype=np.int64)


def encode_tiktoken(encoding: Any, cut_every: int, longest_run: int, text: str) -> Ids:
    """Encode with a ``tiktoken.Encoding`` the way torchtune does: parts of ``cut_every`` characters, and no
    run of white space or of anything else longer than ``longest_run`` in one call (tiktoken is quadratic in
    it).
    """
    run = re.compile(rf"\s{{{longest_run + 1},}}|\S{{{longest_run + 1},}}")
    ids = []
    for begin in range(0, len(text), cut_every):
        part = text[begin : begin + cut_every]
        cuts = [0]
        for match in run.finditer(part):
            cuts += range(match.start() + longest_run, match.end(), longest_run)
        for start, stop in zip(cuts, [*cuts[1:], len(part)], strict=True):
            ids += encoding.encode(part[start:stop], allowed_special=set(), disallowed_special=())
    return np.array(ids, dtype=np.int64)


def encode_torchtune(tokenizer: Any, text: str) -> Ids:
    """Encode with any torchtune tokenizer."""
    return np.array(tokenizer.encode(text, add_bos=False, add_eos=False), dtype=np.int64)


def encode_configured(config: str, text: str) -> Ids:
    """Encode with the tokenizer that a config section (as JSON) builds, once per process; for tokenizers that
    cannot be pickled.
    """
    return encode_torchtune(_build(config), text)


@lru_cache(maxsize=1)
def _build(config: str) -> Any:
    from omegaconf import OmegaConf
    from torchtune.config import instantiate

    return instantiate(OmegaConf.create(json.loads(config)))


def tokenizer_class(tokenizer: Any) -> TokenizerClass | None:
    """Return what is known about the class of a tokenizer; None for one that is not torchtune's."""
    kind = type(tokenizer)
    return TOKENIZER_CLASSES.get(kind.__name__) if kind.__module__.startswith("torchtune.") else None


def encoding_of(tokenizer: Any, config: Mapping[str, Any]) -> Encoding:
    """Return the encoding of an instantiated torchtune tokenizer.

    Args:
        tokenizer: the component.
        config: the config section that built it.
    """
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer, _tiktoken

    known = tokenizer_class(tokenizer)
    kind = known and known.kind
    if type(tokenizer) is HuggingFaceBaseTokenizer:
        inner = tokenizer.tokenizer
        # A tokenizer.json may hold the length limit that it was trained with, which would drop text silently.
        inner.no_truncation()
        inner.no_padding()
        description = json.loads(inner.to_str())
        spans = partial(text_spans.spans_of_hf, inner, description)
        return Encoding(partial(encode_hf, inner), one_call=why_one_call(description), spans=spans)
    if kind == "sentencepiece":
        processor = tokenizer._spm_model.spm_model
        return Encoding(
            partial(encode_sentencepiece, processor),
            one_call=_why_one_call_sentencepiece(processor),
            spans=partial(text_spans.spans_of_sentencepiece, processor),
        )
    if kind == "tiktoken" and type(tokenizer.tt_model) is _tiktoken.TikTokenBaseTokenizer:
        cut_every, longest_run = _tiktoken.MAX_ENCODE_CHARS, _tiktoken.MAX_NO_WHITESPACE_CHARS
        inner = tokenizer.tt_model.tt_model
        encode = partial(encode_tiktoken, inner, cut_every, longest_run)
        return Encoding(encode, cut_every=cut_every, spans=partial(text_spans.spans_of_tiktoken, inner))
    unknown = f"nothing is known about cutting texts for {type(tokenizer).__name__}"
    reason = None if kind == "byte_level" else unknown
    spans_of = None
    if kind == "byte_level":
        spans_of = partial(text_spans.spans_of_byte_level, tokenizer.encoder, tokenizer.special_tokens)
    encode = partial(encode_torchtune, tokenizer)
    if "_component_" in config:
        encode = partial(encode_configured, json.dumps(dict(config)))
    return Encoding(encode, one_call=reason, spans=spans_of)


def _why_one_call_sentencepiece(processor: Any) -> str | None:
    import sentencepiece.sentencepiece_model_pb2 as protos

    model: Any = protos
    description = model.ModelProto.FromString(processor.serialized_model_proto())
    byte_pair_encoding = 2  # TrainerSpec.ModelType.BPE
    if description.trainer_spec.model_type != byte_pair_encoding:
        return "its SentencePiece model is not byte-pair encoding and weighs the whole text at once"
    return None
