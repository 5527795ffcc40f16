"""transformers' models, split over processes, score as on one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.hf_models import CASES, on_meta, section, written
from helpers.processes import run_ranks
from ppl_eval.checkpoints.lazy_state_dict import under_own_names
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.weights_hash import MODULUS, WeightsHash
from ppl_eval.models import hf_attention
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring.split import split_model

CPU = torch.device("cpu")
SINGLE, COPIES, FSDP, CP, TP = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)
# Longer than the 32 of phi3_longrope; the part of the second of two ranks is shorter.
TOKENS_BT = torch.randint(3, 160, (2, 36), generator=torch.Generator().manual_seed(1))
FEW = [
    *("llama_tied", "mistral", "phi3_longrope", "olmo2", "cohere_qk_norm", "gemma2", "gemma3", "glm4"),
    *("gpt_neox", "gpt2", "deepseek_v3", "gpt_oss", "bloom", "mamba2", "bamba", "falcon"),
]
NOT_IN_PARTS = ("falcon", "bloom", "mamba2", "bamba", "granitemoehybrid")
NOT_DIVIDED = {
    **dict.fromkeys(("gpt2", "stablelm", "falcon", "bloom", "mamba2", "opt"), "has no plan"),
    **dict.fromkeys(("gpt_oss", "bamba"), "splits no layer"),
    **dict.fromkeys(
        ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "deepseek_v3", "phimoe", "granitemoehybrid"),
        "experts as moe_tp_experts",
    ),
    "minicpm3": r"kv_a_proj_with_mqa as mla_kv_a_proj",
    "cohere_qk_norm": r"how model\.layers\.0\.self_attn\.q_norm\.weight is split",
}


@torch.no_grad()
def score(folder, attention, degrees, dtype=torch.float32):
    """NLL of every token, the same on all ranks; and this rank's share of the hash of the weights."""
    dims = ParallelDims(*degrees, dist.get_world_size() if dist.is_initialized() else 1)
    decoder = on_meta(folder, attention, dtype)
    tensors = under_own_names(decoder, load_state_dict(section(folder)).state_dict)[0]
    decoder.module.eval().requires_grad_(False)
    decoder.prepare(CPU)
    model = split_model(decoder, dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=2**14)
    weights = WeightsHash()
    model.load(tensors, weights)
    weights.close()
    found_N, _ = model.scorer(TOKENS_BT[:, :-1].contiguous(), TOKENS_BT[:, 1:].contiguous())
    return found_N.double().numpy(), weights.counted


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, id="few"), pytest.param(list(CASES), id="all", marks=pytest.mark.slow)],
)
def alone(request, tmp_path_factory):
    """Folder, attention and scores on one process, by model."""
    found = {}
    for name in request.param:
        folder = tmp_path_factory.mktemp(name)
        _, attention = written(name, folder)
        found[name] = (folder, attention, *score(folder, attention, SINGLE))
    return found


@run_ranks(2)
def test_models_in_parts_score_as_whole_ones(alone):
    for name, (folder, attention, expected_N, expected_hash) in alone.items():
        for axis, degrees, refused in (("cp", CP, NOT_IN_PARTS), ("tp", TP, NOT_DIVIDED)):
            if name not in refused:
                found_N, counted = score(folder, attention, degrees)
                assert_close(found_N, expected_N, f"{axis} {name}")
                assert hash_of(counted) == expected_hash, f"{axis} {name}"


@run_ranks(2)
def test_what_cannot_be_split_is_refused_before_it_is_loaded(alone):
    for name, (folder, attention, *_) in alone.items():
        if name in NOT_IN_PARTS:
            with pytest.raises(ValueError, match="context_parallel_dim is not available for a"):
                score(folder, attention, CP)
        if name in NOT_DIVIDED:
            with pytest.raises(ValueError, match=NOT_DIVIDED[name]):
                score(folder, attention, TP)


@run_ranks(2)
def test_what_runs_between_positions_unseen_is_found_out(alone):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_attention, "why_not", lambda *_: None)
        for name in ("bloom", "mamba2", "bamba"):
            folder, attention, *_ = alone[name]
            with pytest.raises(ValueError, match="gives other hidden states than the model's own forward"):
                score(folder, attention, CP)


@run_ranks(2)
def test_buffers_and_weights_of_another_dtype_are_read_into_shards(alone):
    folder, attention, expected_N, expected_hash = alone["deepseek_v3"]
    found_N, counted = score(folder, attention, FSDP)
    np.testing.assert_array_equal(found_N, expected_N)
    assert hash_of(counted) == expected_hash
    # transformers keeps the router in float32 beside bfloat16: a unit of its own.
    copies, shards = (score(folder, attention, degrees, torch.bfloat16)[0] for degrees in (COPIES, FSDP))
    np.testing.assert_array_equal(shards, copies)


def test_degrees_follow_from_heads_and_widths(alone):
    def sizes(name):
        return on_meta(alone[name][0], alone[name][1]).tensor_parallel_layout().sizes

    assert sizes("llama_tied") == {
        "heads": {4},
        "key-value heads": {2},
        **{f"outputs of {part}_proj": {96} for part in ("gate", "up")},
        "inputs of o_proj": {64},
        "inputs of down_proj": {96},
    }
    # One matrix for queries, keys and values: its outputs are gathered, so heads need not divide.
    assert "heads" not in sizes("phi3_longrope")


def hash_of(counted):
    per_rank = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, counted)
    return sum(per_rank) % MODULUS


def assert_close(found_N, expected_N, what):
    difference = np.abs(found_N - expected_N).max()
    if dist.get_rank() == 0:
        print(f"  {what}: largest token difference {difference:.1e}", flush=True)
    np.testing.assert_allclose(found_N.sum(), expected_N.sum(), rtol=1e-6, err_msg=what)
    np.testing.assert_allclose(found_N, expected_N, rtol=2e-5, atol=2e-5, err_msg=what)
