"""What a CPU cannot show; every test skips itself where there is no CUDA device. docs/gpu-checks.md has the
rest."""

import contextlib
import io

import pytest
import torch

import distributed_ppl_eval
from helpers.runs import many, result_of
from helpers.tiny import SHAPE, write_config
from ppl_eval.scoring.nll import ScoringModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


@pytest.fixture
def evaluate(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, device="cuda")

    def evaluate(*overrides):
        with contextlib.redirect_stdout(io.StringIO()):
            assert distributed_ppl_eval.run(["--config", str(config), *overrides]) == 0
        return result_of(tmp_path / "out")

    return evaluate


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_cuda_agrees_with_cpu(evaluate, dtype, tolerance):
    on_cuda, on_cpu = evaluate(f"dtype={dtype}"), evaluate(f"dtype={dtype}", "device=cpu")
    assert on_cuda["device"] == "cuda"
    assert on_cuda["coverage"] == on_cpu["coverage"]
    assert on_cuda["ce_loss"] == pytest.approx(on_cpu["ce_loss"], rel=tolerance)


def test_two_runs_have_the_same_bits(evaluate):
    assert evaluate("dtype=bf16")["nll_sum_hex"] == evaluate("dtype=bf16")["nll_sum_hex"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_same_bits(evaluate, tiny, tmp_path):
    alone = evaluate()["nll_sum_hex"]
    config = str(tmp_path / "config.yaml")
    finished = many(2, [["--config", config, f"output_dir={tmp_path / 'two'}"]], tmp_path)
    assert finished.code == 0, finished.output
    assert result_of(tmp_path / "two")["nll_sum_hex"] == alone


def test_logits_stay_within_their_budget():
    from torchtune.models.llama3_2 import llama3_2

    budget = 32 << 20
    with torch.device("cuda"):
        decoder = (
            llama3_2(**{**SHAPE, "vocab_size": 128_256, "max_seq_len": 2048}).eval().requires_grad_(False)
        )
    scorer = ScoringModel(decoder.to(torch.bfloat16), budget)
    tokens_BT = torch.zeros(1, 2048, dtype=torch.int64, device="cuda")
    hidden_ND = decoder(tokens_BT)[0]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scorer._score_hidden(hidden_ND, tokens_BT[0])
    assert torch.cuda.max_memory_allocated() - before < budget + (1 << 20)


def test_int4_on_cuda(evaluate):
    plain = evaluate("dtype=bf16")
    packed = evaluate(
        "dtype=bf16",
        "quantizer=torchtune.training.quantization.Int4WeightOnlyQuantizer",
        "quantizer.groupsize=64",
    )
    assert packed["quantizer"]["num_quantized"] > 0
    assert packed["nll_sum_hex"] != plain["nll_sum_hex"]
