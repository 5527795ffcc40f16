"""What exceptions mean for the person: message and exit code."""

import errno
import os

import pytest
import torch

from ppl_eval.config import activity
from ppl_eval.distributed.causes import explain
from ppl_eval.results.baseline import IncomparableError

HERE = "rank 3 on node1"


@pytest.fixture(autouse=True)
def scoring():
    activity.begin()
    activity.enter("scoring")
    activity.finished([16, 17])
    yield
    activity.begin()


def noted(error, note):
    error.add_note(note)
    return error


def failed_allocation():
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60, dtype=torch.uint8)
    return failure.value


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), failed_allocation()]
)
def test_out_of_memory_says_what_needs_less(error):
    failure = explain(noted(error, "while scoring window 18-19 (document 4)"), HERE)
    assert failure.code == 1
    start = f"{HERE} is out of memory in phase 'scoring', last finished window 17, while scoring window 18-19"
    assert failure.message.startswith(start)
    for key in (
        "batch_size",
        "protocol.max_seq_len",
        "max_logits_mib",
        "data_parallel_shard_dim",
        "quantizer",
    ):
        assert key in failure.message


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("batch_size is 0"), 2, "batch_size is 0"),
        (IncomparableError("other protocol"), 4, "other protocol"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/out/result.json"),
            2,
            "[Errno 28] No space left on device: '/data/out/result.json' (rank 3 on node1, phase 'scoring',"
            " last finished window 17)",
        ),
        (
            noted(RuntimeError("shapes differ"), "while scoring window 18 (document 4)"),
            1,
            "rank 3 on node1, phase 'scoring', last finished window 17, while scoring window 18 (document 4):"
            " RuntimeError: shapes differ",
        ),
    ],
)
def test_message_and_exit_code(error, code, words):
    failure = explain(error, HERE)
    assert (failure.code, failure.message) == (code, words)
