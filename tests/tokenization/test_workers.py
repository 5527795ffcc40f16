"""Worker processes: the same ids in order, none left behind, and a killed one is named."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from helpers.texts import nasty_text
from helpers.tiny_tokenizers import hf_encoding
from ppl_eval.tokenization import chunking, workers


def children() -> set[psutil.Process]:
    # Other tests may have left a fork server, which waits for the next one that wants it.
    return set(psutil.Process(os.getpid()).children())


def test_workers_give_the_same_ids_in_order_and_go_away(tmp_path: Path) -> None:
    encoding = hf_encoding("byte_level", tmp_path)
    text = "".join(nasty_text(seed) for seed in range(5))
    groups = list(chunking.group(chunking.cut([(0, text, True)], encoding, 300), 300))
    assert len(groups) > 10
    others = children()
    encoded = workers.encode_groups(encoding.encode, groups, num_workers=2)
    begun = [next(encoded)]
    begotten = children() - others
    assert len(begotten) == 2
    ids = np.concatenate([chunk.ids for chunk in chunking.checked([*begun, *encoded])])
    np.testing.assert_array_equal(ids, encoding.encode(text))
    assert not any(child.is_running() for child in begotten)


def test_a_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    others = children()
    encoding = hf_encoding("byte_level", tmp_path)
    groups = list(chunking.group(chunking.cut([(0, nasty_text(1, 4000), True)], encoding, 300), 300))
    encoded = workers.encode_groups(encoding.encode, groups, num_workers=2)
    next(encoded)
    for child in children() - others:
        child.kill()
    with pytest.raises(RuntimeError, match="exit code -9"):
        list(encoded)
