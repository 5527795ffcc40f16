"""Every way of splitting a model and a run over processes gives the scores of one process."""

import numpy as np
import pytest
import torch

from helpers.models import VOCAB_SIZE, on_meta, random_weights
from helpers.processes import run_ranks
from ppl_eval.mesh import ParallelDims
from ppl_eval.parallel import split_model
from ppl_eval.sampler import DUMMY_BATCH, ExactDistributedSampler
from ppl_eval.scoring import window_scores
from ppl_eval.tokens import IGNORE_INDEX

CPU = torch.device("cpu")
MAX_LOGITS_BYTES = 20 * VOCAB_SIZE * 8
# (dp_replicate, dp_shard, cp, tp)
SINGLE = (1, 1, 1, 1)
DATA_PARALLEL = {
    2: [(2, 1, 1, 1), (1, 2, 1, 1)],
    3: [(3, 1, 1, 1), (1, 3, 1, 1)],
    4: [(2, 2, 1, 1), (1, 4, 1, 1)],
}
REORDERING = {
    2: [(1, 1, 1, 2), (1, 1, 2, 1)],
    3: [(1, 1, 1, 3), (1, 1, 3, 1)],
    4: [(1, 1, 4, 1), (2, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 2, 1)],
    8: [(2, 2, 2, 1), (1, 2, 2, 2)],
}
TIED_AND_UNTIED = ("llama3", "llama3_tied")
FAMILIES = (
    "llama2",
    "llama3",
    "llama3_tied",
    "mistral",
    "gemma",
    "gemma2",
    "phi3",
    "phi3_longrope",
    "qwen2",
    "qwen2_tied",
)


def batches():
    """Five batches of windows of unequal lengths: right padded, some targets unscored, some windows without
    any.
    """
    generator = torch.Generator().manual_seed(1)
    made = []
    for lengths in ([33, 21, 1], [40], [13, 2, 5], [32, 32], [3, 17]):
        tokens_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        labels_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
        for row, length in enumerate(lengths):
            sequence = torch.randint(VOCAB_SIZE, (length + 1,), generator=generator)
            tokens_BT[row, :length], labels_BT[row, :length] = sequence[:-1], sequence[1:]
        labels_BT[0, : max(lengths) // 3] = IGNORE_INDEX
        made.append((tokens_BT, labels_BT))
    return made


DUMMY = (torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORE_INDEX))


@torch.no_grad()
def score(name, degrees, rank=0, world_size=1, **options):
    """Scores of the batches that this rank counts: {batch: [4, windows] array}."""
    dims = ParallelDims(*degrees, world_size)
    model = split_model(
        on_meta(name), dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=MAX_LOGITS_BYTES, **options
    )
    model.load(random_weights(name))
    scores = {}
    for index in ExactDistributedSampler(
        5, dims.dp_degree, dims.dp_rank(rank), equal_steps=dims.fsdp_enabled
    ):
        tokens_BT, labels_BT = DUMMY if index == DUMMY_BATCH else batches()[index]
        nll_N, correct_N = model.scorer(tokens_BT, labels_BT)
        if index != DUMMY_BATCH and dims.is_counted(rank):
            scores[index] = np.stack(window_scores(nll_N, correct_N, labels_BT, len(tokens_BT)))
    return scores


def score_all(rank, world_size, cases):
    return [score(name, degrees, rank, world_size, **options) for name, degrees, options in cases]


def together(per_rank):
    """Scores of all ranks; each batch must have been counted exactly once."""
    counted = [batch for scores in per_rank for batch in scores]
    assert sorted(counted) == [0, 1, 2, 3, 4], counted
    return np.concatenate(
        [scores[batch] for batch in range(5) for scores in per_rank if batch in scores], axis=1
    )


@pytest.fixture(scope="module")
def alone():
    found = {name: together([score(name, SINGLE)]) for name in FAMILIES}
    for name, scores in found.items():
        assert 2.0 < scores[0].sum() / scores[2].sum() < 20.0, name
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_split_scores_as_one_process(alone, world_size):
    exact = [
        (name, degrees, {})
        for degrees in DATA_PARALLEL.get(world_size, [])
        for name in ("llama3", "llama3_tied")
    ]
    close = [(name, degrees, {}) for degrees in REORDERING[world_size] for name in ("llama3", "llama3_tied")]
    per_rank = run_ranks(score_all, world_size, exact + close)
    for index, (name, degrees, _) in enumerate(exact + close):
        scores = together([scores[index] for scores in per_rank])
        if index < len(exact):
            np.testing.assert_array_equal(scores, alone[name], err_msg=f"{name} {degrees}")
        else:
            assert_close(scores, alone[name], f"{name} {degrees}")


def test_every_family_is_split(alone):
    cases = [(name, degrees, {}) for name in FAMILIES for degrees in ((1, 1, 1, 2), (1, 1, 2, 1))]
    per_rank = run_ranks(score_all, 2, cases)
    for index, (name, degrees, _) in enumerate(cases):
        assert_close(together([scores[index] for scores in per_rank]), alone[name], f"{name} {degrees}")


def assert_close(scores, reference, what):
    nll_sum, nll_sq_sum, num_tokens, num_correct = scores
    np.testing.assert_array_equal(num_tokens, reference[2], err_msg=what)
    np.testing.assert_array_equal(num_correct, reference[3], err_msg=what)
    np.testing.assert_allclose(nll_sum, reference[0], rtol=1e-6, err_msg=what)
    np.testing.assert_allclose(nll_sq_sum, reference[1], rtol=1e-5, err_msg=what)
