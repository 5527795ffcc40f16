"""One interface for torchtune's tokenizers: text to ids without BOS, and whether the model's own tokenizer
adds one.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppl_eval.config.files import read_json_object
from ppl_eval.tokenization.encoders import Encoding, encoding_of, tokenizer_class


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer as this project uses it.

    Attributes:
        encoding: text to ids, no BOS and no EOS, and what it takes to do so in chunks.
        decode: ids to text.
        bos_id: id of BOS, or None.
        eos_id: id of EOS, or None.
        adds_bos: whether the model's own tokenizer call puts BOS first.
        vocab_size: number of ids.
        sha256: hash of the tokenizer's files.
        tokenizer: torchtune's object, for its own datasets.
        special_tokens: what becomes of names of special tokens in a text: parsed to their ids (``parse``), or
            spelled in letters (``text``).
        folder: where its tokenizer.json lies, for the chat template beside it; None where it has none.
    """

    encoding: Encoding
    decode: Callable[[list[int]], str]
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    vocab_size: int
    sha256: str
    tokenizer: Any = None
    special_tokens: str = "parse"
    folder: Path | None = None

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Encode a text in one call, no BOS and no EOS."""
        return self.encoding.encode(text)

    def name_of(self, token: int) -> str:
        """Return what a message calls an id: the token as its tokenizer writes it."""
        special = getattr(self.tokenizer, "special_tokens", None) or {}
        names = [name for name, index in special.items() if index == token]
        inner = getattr(self.tokenizer, "tokenizer", None)
        if not names and inner is not None and hasattr(inner, "id_to_token"):
            names = [inner.id_to_token(token)]
        try:
            return repr(names[0] if names else self.decode([token]))
        except (KeyError, IndexError, ValueError, TypeError):
            return "without a name"

    def bos_tokens(self, policy: str) -> list[int]:
        """Return the ids before a text under a BOS policy; ``each_window`` leaves that to the windows.

        Raises:
            ValueError: if BOS is wanted and the tokenizer has none.
        """
        if policy in ("never", "each_window") or (policy == "tokenizer" and not self.adds_bos):
            return []
        if self.bos_id is None:
            raise ValueError(
                f"protocol.bos is {policy!r}, but this tokenizer has no BOS token; use protocol.bos=never"
            )
        return [self.bos_id]


def without_bos(config: Mapping[str, Any]) -> Any:
    """Return torchtune's ``HuggingFaceBaseTokenizer`` of a section whose tokenizer_config.json has no BOS or
    no EOS (``bos_token: null``, as Qwen's has), which the class itself refuses, or which has only a
    generation_config.json; None for any other section.
    """
    from tokenizers import Tokenizer
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    if str(config.get("_component_", "")).rpartition(".")[2] != HuggingFaceBaseTokenizer.__name__:
        return None
    keys = ("tokenizer_config_json_path", "generation_config_path")
    paths = [Path(str(config[key])) if config.get(key) else None for key in keys]
    if not any(paths) or not all(path is None or path.is_file() for path in paths):
        return None
    contents: list[dict[str, Any]] = [{} if path is None else read_json_object(path) for path in paths]
    about, generation = contents
    if all(about.get(f"{name}_token") is not None for name in ("bos", "eos")):
        return None
    tokenizer = HuggingFaceBaseTokenizer.__new__(HuggingFaceBaseTokenizer)
    tokenizer.tokenizer = Tokenizer.from_file(str(config["tokenizer_json_path"]))
    tokenizer.config, tokenizer.generation_config = about, generation or None
    for name in ("bos", "eos"):
        token = about.get(f"{name}_token")
        content = token["content"] if isinstance(token, dict) else token
        index = None if content is None else tokenizer.tokenizer.token_to_id(content)
        # A tokenizer_config.json without BOS means it, whatever generation_config.json has.
        if index is None and (name == "eos" or paths[0] is None):
            index = generation.get(f"{name}_token_id")
            index = index[0] if isinstance(index, list) else index
        setattr(tokenizer, f"{name}_id", index)
    tokenizer._infer_should_add_bos_eos()
    return tokenizer


def wrap_tokenizer(tokenizer: Any, config: Mapping[str, Any], special_tokens: str = "parse") -> TextEncoder:
    """Wrap an instantiated torchtune tokenizer.

    Args:
        tokenizer: the component of the config's ``tokenizer`` section.
        config: that section, whose file names are hashed.
        special_tokens: one of ``encoders.SPECIAL_TOKENS``.

    Raises:
        ValueError: if the tokenizer cannot treat special tokens so.
    """
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    encoding = encoding_of(tokenizer, config, special_tokens)
    if isinstance(tokenizer, HuggingFaceBaseTokenizer):
        adds_bos = tokenizer.hf_adds_bos or bool((tokenizer.config or {}).get("add_bos_token"))
        adds_bos = adds_bos and tokenizer.bos_id is not None
    else:
        known = tokenizer_class(tokenizer)
        adds_bos = known.adds_bos if known else tokenizer.bos_id is not None
    return TextEncoder(
        encoding=encoding,
        decode=tokenizer.decode,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        adds_bos=adds_bos,
        vocab_size=_vocab_size(tokenizer),
        sha256=_hash_files(config),
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        folder=Path(config["tokenizer_json_path"]).parent if "tokenizer_json_path" in config else None,
    )


def _vocab_size(tokenizer: Any) -> int:
    """Return one more than the highest id.

    What torchtune's classes call ``vocab_size`` may leave special tokens out, and Qwen's have no such name.
    """
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is not None and hasattr(inner, "get_vocab"):
        return max(inner.get_vocab().values()) + 1
    known = getattr(tokenizer, "vocab_size", None) or len(tokenizer.encoder)
    return max(known, *(special + 1 for special in getattr(tokenizer, "special_tokens", {}).values()), 0)


def _hash_files(config: Mapping[str, Any]) -> str:
    # Settings that are not files (a prompt template, a maximal length) shape the ids too.
    digest = hashlib.sha256()
    for key in sorted(config):
        value = config[key]
        path = Path(value) if isinstance(value, str) else None
        content = path.read_bytes() if path is not None and path.is_file() else str(value).encode()
        digest.update(f"{key}:{len(content)}:".encode() + content)
    return digest.hexdigest()
