"""Small plans, token streams and encoders without a model, for tests of windows and batches."""

from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from ppl_eval.data.token_data import TokenData
from ppl_eval.protocols.base import Protocol, Windows
from ppl_eval.protocols.plan import make_plan
from ppl_eval.tokenization.encoders import Encoding
from ppl_eval.tokenization.tokenizer import TextEncoder

BOS, EOS = 1, 2


def windows_of(protocol: Protocol, *lengths: int) -> Windows:
    """All windows of documents of these lengths."""
    plan = make_plan(protocol, np.cumsum([0, *lengths]), batch_size=4)
    return plan.windows(0, plan.num_windows)


def scored(protocol: Protocol, length: int) -> list[list[int]]:
    """The positions that each window of one document scores."""
    windows = windows_of(protocol, length)
    return [list(range(a, b)) for a, b in zip(windows.score_start, windows.stop, strict=True)]


def scored_once(protocol: Protocol, length: int) -> list[int]:
    """The positions that all windows of one document score, in order."""
    return list(chain.from_iterable(scored(protocol, length)))


def encoder(adds_bos: bool = False, bos_id: int | None = BOS, eos_id: int | None = EOS) -> TextEncoder:
    """A tokenizer of which only the special tokens matter."""
    return TextEncoder(
        encoding=Encoding(lambda text: np.array([], dtype=np.int64)),
        decode=str,
        bos_id=bos_id,
        eos_id=eos_id,
        adds_bos=adds_bos,
        vocab_size=100,
        sha256="",
    )


def token_data(*documents: list[int], labels: npt.NDArray[np.int32] | None = None) -> TokenData:
    """Documents of these tokens."""
    none = np.zeros(len(documents), dtype=np.int64)
    return TokenData(
        tokens=np.concatenate([np.array(tokens, dtype=np.uint16) for tokens in documents]),
        offsets_D1=np.cumsum([0, *map(len, documents)]),
        num_bytes_D=none,
        num_words_D=none,
        num_documents=len(documents),
        fingerprint={},
        labels=labels,
    )


def counted_tokens(*lengths: int, labels: npt.NDArray[np.int32] | None = None) -> TokenData:
    """Documents of these lengths whose tokens count up from 100."""
    ends = np.cumsum([100, *lengths])
    documents = [list(range(a, b)) for a, b in pairwise(ends)]
    return token_data(*documents, labels=labels)
