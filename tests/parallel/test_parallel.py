"""Every way of splitting a model and a run over processes gives the scores of one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchao.quantization.linear_quant_modules import Int8DynActInt4WeightLinear
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.models.llama3 import base_llama_tp_plan

from helpers.models import VOCAB_SIZE, on_meta, random_weights
from helpers.processes import run_ranks
from ppl_eval.parallel import context_parallel
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.parallel.tensor_parallel import bounds
from ppl_eval.protocols.sampler import DUMMY_BATCH, batches_of
from ppl_eval.scoring.nll import window_scores
from ppl_eval.scoring.softmax import Softmax, token_nll
from ppl_eval.scoring.split import split_model

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
# phi4 and qwen2_5 are built by the code of phi3 and qwen2.
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
    "mistral_nemo",
    "phi4_mini",
    "qwen3",
    "olmo2",
    "granite3",
    "gemma3",
    "smollm3",
)
# Whose layers are this project's own, so that FSDP is tried on them too.
OWN = ("qwen3", "olmo2", "granite3", "gemma3")


def batches():
    """Five batches of windows of unequal lengths: right padded, some targets unscored, some windows without
    any.
    """
    generator = torch.Generator().manual_seed(1)
    made = []
    for lengths in ([33, 21, 1], [40], [13, 2, 5], [32, 32], [3, 17]):
        tokens_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        labels_BT = torch.full_like(tokens_BT, CROSS_ENTROPY_IGNORE_IDX)
        for row, length in enumerate(lengths):
            sequence = torch.randint(VOCAB_SIZE, (length + 1,), generator=generator)
            tokens_BT[row, :length], labels_BT[row, :length] = sequence[:-1], sequence[1:]
        labels_BT[0, : max(lengths) // 3] = CROSS_ENTROPY_IGNORE_IDX
        made.append((tokens_BT, labels_BT))
    return made


DUMMY = (torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), CROSS_ENTROPY_IGNORE_IDX))


@torch.no_grad()
def score(name, degrees, **options):
    """Scores of all batches in order, [4, windows]; each of them must have been counted by one rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dims = ParallelDims(*degrees, world_size)
    model = split_model(
        on_meta(name), dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=MAX_LOGITS_BYTES, **options
    )
    model.load(random_weights(name))
    scores = {}
    for index in batches_of(dims.dp_rank(rank), dims.dp_degree, range(5), equal_steps=dims.fsdp_enabled):
        tokens_BT, labels_BT = DUMMY if index == DUMMY_BATCH else batches()[index]
        nll_N, correct_N = model.scorer(tokens_BT, labels_BT)
        if index != DUMMY_BATCH and dims.is_counted(rank):
            scores[index] = np.stack(window_scores(nll_N, correct_N, labels_BT, len(tokens_BT))[:4])
    per_rank = [scores]
    if world_size > 1:
        per_rank = [None] * world_size
        dist.all_gather_object(per_rank, scores)
    counted = [batch for scores in per_rank for batch in scores]
    assert sorted(counted) == [0, 1, 2, 3, 4], counted
    return np.concatenate(
        [scores[batch] for batch in range(5) for scores in per_rank if batch in scores], axis=1
    )


@pytest.fixture(scope="module")
def alone():
    found = {name: score(name, SINGLE) for name in FAMILIES}
    for name, scores in found.items():
        assert 2.0 < scores[0].sum() / scores[2].sum() < 20.0, name
    return found


@run_ranks(2, 3, 4, 8)
def test_every_split_scores_as_one_process(alone, world_size):
    for name in TIED_AND_UNTIED:
        for degrees in DATA_PARALLEL.get(world_size, []):
            np.testing.assert_array_equal(score(name, degrees), alone[name], err_msg=f"{name} {degrees}")
        for degrees in REORDERING[world_size]:
            assert_close(score(name, degrees), alone[name], f"{name} {degrees}")


@run_ranks(2)
def test_every_family_is_split(alone, world_size):
    for name in FAMILIES:
        for degrees in ((1, 1, 1, 2), (1, 1, 2, 1)):
            if (name, degrees) == ("olmo2", (1, 1, 1, 2)):
                with pytest.raises(ValueError, match="normalised over all heads together"):
                    score(name, degrees)
                continue
            assert_close(score(name, degrees), alone[name], f"{name} {degrees}")
    for name in OWN:
        for degrees in DATA_PARALLEL[world_size]:
            np.testing.assert_array_equal(score(name, degrees), alone[name], err_msg=f"{name} {degrees}")


def assert_close(scores, reference, what):
    nll_sum, nll_sq_sum, num_tokens, num_correct = scores
    np.testing.assert_array_equal(num_tokens, reference[2], err_msg=what)
    np.testing.assert_array_equal(num_correct, reference[3], err_msg=what)
    np.testing.assert_allclose(nll_sum, reference[0], rtol=1e-6, err_msg=what)
    np.testing.assert_allclose(nll_sq_sum, reference[1], rtol=1e-5, err_msg=what)


def hard_logits():
    logits_NV = 3 * torch.randn(12, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    targets_N = torch.arange(12) * 9
    logits_NV[0] = 0.0  # all equal: the first is the argmax, and the target
    logits_NV[1] = 0.0  # all equal, and the target is not the first
    logits_NV[2, 18], logits_NV[2, 90] = 50.0, 50.0  # a tie of which the target is the first
    logits_NV[3, 27], logits_NV[3, 5] = 50.0, 50.0  # and the second
    logits_NV[4, 77] = float("nan")
    logits_NV[5, 45] = 1e4
    logits_NV[6, 3] = 1e4
    logits_NV[7] -= 1e4
    return logits_NV, targets_N


@run_ranks(1, 3)
def test_nll_from_parts_of_the_vocabulary(world_size):
    logits_NV, targets_N = hard_logits()
    expected_N = torch.nn.functional.cross_entropy(logits_NV.double(), targets_N, reduction="none")
    assert (targets_N == logits_NV.argmax(dim=1))[:6].tolist() == [True, False, True, False, False, True]
    start, stop = bounds(VOCAB_SIZE, world_size, dist.get_rank())
    nll_N, correct_N = token_nll(
        logits_NV[:, start:stop].clone(), targets_N, Softmax("exact", start, dist.group.WORLD)
    )
    torch.testing.assert_close(nll_N.double(), expected_N, rtol=1e-6, atol=1e-6, equal_nan=True)
    agrees_N = correct_N == (targets_N == logits_NV.argmax(dim=1))
    assert (agrees_N | nll_N.isnan()).all()
    assert nll_N.isnan().tolist() == [row == 4 for row in range(12)]


@run_ranks(1, 3)
def test_details_from_parts_of_the_vocabulary(world_size):
    logits_NV, targets_N = hard_logits()
    logits_NV[4] = 1.0
    start, stop = bounds(VOCAB_SIZE, world_size, dist.get_rank())
    softmax = Softmax("exact", start, dist.group.WORLD, details=True)
    found = token_nll(logits_NV[:, start:stop].clone(), targets_N, softmax)
    plain = token_nll(logits_NV[:, start:stop].clone(), targets_N, softmax._replace(details=False))
    whole = token_nll(logits_NV, targets_N, Softmax(details=True))
    assert torch.equal(found[0], plain[0])
    for values_N, expected_N in zip(found[1:4], whole[1:4], strict=True):
        assert values_N.tolist() == expected_N.tolist()
    torch.testing.assert_close(found[4], whole[4], rtol=1e-6, atol=1e-6)


@run_ranks(2)
def test_details_of_a_sequence_in_parts(world_size):
    found = []
    # Replicas score alone.
    for degrees in ((1, 1, world_size, 1), (world_size, 1, 1, 1)):
        dims = ParallelDims(*degrees, world_size)
        model = split_model(
            on_meta("llama3"),
            dims,
            dims.build_mesh("cpu"),
            CPU,
            max_logits_bytes=MAX_LOGITS_BYTES,
            details=True,
        )
        model.load(random_weights("llama3"))
        with torch.no_grad():
            found.append(model.scorer(*batches()[0]))
    for values_N, expected_N in zip(*found, strict=True):
        torch.testing.assert_close(values_N, expected_N, rtol=1e-5, atol=1e-5)


@run_ranks(2)
def test_split_rows_have_no_bias_in_a_large_vocabulary(world_size):
    # As many as Llama 3 has. torch's own cross entropy is 4e-6 nats too low here, on average.
    logits_NV = 3 * torch.randn(128, 128_256, generator=torch.Generator().manual_seed(3))
    targets_N = torch.arange(128)
    expected_N = torch.nn.functional.cross_entropy(logits_NV.double(), targets_N, reduction="none")
    start, stop = bounds(128_256, world_size, dist.get_rank())
    nll_N, _ = token_nll(
        logits_NV[:, start:stop].clone(), targets_N, Softmax("exact", start, dist.group.WORLD)
    )
    assert abs((nll_N - expected_N).mean().item()) < 3e-7


@run_ranks(2)
def test_what_cannot_be_split_is_refused_in_words(world_size):
    def refused(name, degrees, change=None, **options):
        dims = ParallelDims(*degrees, world_size)
        decoder = on_meta(name)
        if change is not None:
            change(decoder)
        with pytest.raises(ValueError) as failure:
            split_model(
                decoder, dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=MAX_LOGITS_BYTES, **options
            )
        return str(failure.value)

    def seven_heads(decoder):
        decoder.layers[1].attn.num_heads = decoder.layers[1].attn.num_kv_heads = 7

    def quantized(decoder):
        decoder.layers[1].mlp.w2 = Int8DynActInt4WeightLinear(36, 48, bias=False, groupsize=4)

    tp2, cp2 = (1, 1, 1, 2), (1, 1, 2, 1)
    heads = refused("llama3", tp2, seven_heads)
    assert "7 and 12 heads" in heads
    assert "valid degrees: 1" in heads
    inner = refused("llama3", tp2, quantized)
    assert "layers.1.mlp.w2 is a Int8DynActInt4WeightLinear" in inner
    assert "data_parallel_replicate_dim: -1" in inner
    assert "leave tensor_parallel_plan out" in refused("llama3_tied", tp2, plan=base_llama_tp_plan())
    assert "layers.0.attn is a Gemma2Attention" in refused("gemma2_as_torchtune_has_it", cp2)


@run_ranks(4)
def test_settings_of_a_split(alone, world_size):
    fsdp4, tp2_fsdp2 = (1, 4, 1, 1), (1, 2, 1, 2)
    kept = {"reshard_after_forward": False}
    np.testing.assert_array_equal(score("llama3_tied", fsdp4, **kept), alone["llama3_tied"])
    np.testing.assert_array_equal(score("llama3", fsdp4, cpu_offload=True, **kept), alone["llama3"])
    assert_close(score("llama3", tp2_fsdp2, plan=base_llama_tp_plan()), alone["llama3"], "plan")
    assert_close(score("llama3", (2, 1, 2, 1), shard=False), alone["llama3"], "not sharded")
    # Gathers one key-value head at a time.
    context_parallel._MAX_GATHERED_BYTES = 1
    assert_close(score("llama3", (1, 1, 2, 2)), alone["llama3"], "little gathered")
    options = {"plan": base_llama_tp_plan(), "cpu_offload": True, "max_logits_bytes": MAX_LOGITS_BYTES}
    dims = ParallelDims(4, 1, 1, 1, world_size)
    notes = split_model(on_meta("llama3"), dims, dims.build_mesh("cpu"), CPU, **options).notes
    assert "tensor_parallel_plan has no effect" in notes[0]
    assert "fsdp_cpu_offload has no effect" in notes[1]


@torch.no_grad()
def score_long(degrees, world_size):
    """NLL of one window of 1,100 tokens: each of four chunks is longer than a block of queries."""
    sequence = torch.randint(VOCAB_SIZE, (1, 1101), generator=torch.Generator().manual_seed(4))
    dims = ParallelDims(*degrees, world_size)
    found = []
    for name in ("llama3_long", "mistral_long", "gemma2_long"):
        options = {"max_logits_bytes": MAX_LOGITS_BYTES}
        model = split_model(on_meta(name), dims, dims.build_mesh("cpu"), CPU, **options)
        model.load(random_weights(name))
        found.append(model.scorer(sequence[:, :-1], sequence[:, 1:])[0])
    return torch.stack(found).double()


@pytest.fixture
def long_alone():
    return score_long(SINGLE, 1)


@run_ranks(2)
def test_a_long_window_over_two_ranks(long_alone, world_size):
    nll = score_long((1, 1, 2, 1), world_size)
    torch.testing.assert_close(nll, long_alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(nll.sum(dim=1), long_alone.sum(dim=1), rtol=1e-6, atol=0)
