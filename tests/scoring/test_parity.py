"""The recipe's numbers against a plain transformers loop: full logits, log-softmax in float32, sums in
float64."""

import contextlib
import io
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import distributed_ppl_eval
from helpers.runs import result_of
from helpers.tiny import write_config


def reference(model, ids, max_seq_len, keep_tail=False):
    """Score disjoint windows of a token stream: the NLL by float32 and by float64 log-softmax of the same
    logits, and the number of targets."""
    nll_sum, exact_sum, num_tokens = 0.0, 0.0, 0
    for begin in range(0, len(ids), max_seq_len):
        window = torch.tensor([ids[begin : begin + max_seq_len]])
        if window.shape[1] < max_seq_len and not keep_tail:
            break
        with torch.no_grad():
            logits = model(window).logits[0, :-1].float()
        target_N1 = window[0, 1:, None]
        nll, exact = (-torch.log_softmax(x, dim=-1).gather(1, target_N1) for x in (logits, logits.double()))
        nll_sum += math.fsum(nll.flatten().double().tolist())
        exact_sum += math.fsum(exact.flatten().tolist())
        num_tokens += nll.numel()
    return nll_sum, exact_sum, num_tokens


def evaluate(config: Path, *overrides: str) -> dict:
    """Run the recipe in this process."""
    output_dir = config.parent / "in_process"
    with contextlib.redirect_stdout(io.StringIO()):
        assert (
            distributed_ppl_eval.run(["--config", str(config), f"output_dir={output_dir}", *overrides]) == 0
        )
    return result_of(output_dir)


@pytest.mark.parametrize("keep_tail", [False, True])
def test_tiny_model_in_float32(tiny, tmp_path, private_home, keep_tail):
    from transformers import AutoTokenizer

    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    result = evaluate(config, f"protocol.keep_tail={keep_tail}", "batch_size=3")
    text = tiny.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tiny.folder)(text).input_ids
    nll_sum, _, num_tokens = reference(tiny.twin, ids, 64, keep_tail)
    assert result["num_tokens"] == num_tokens
    assert result["nll_sum"] == pytest.approx(nll_sum, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(nll_sum / num_tokens), rel=1e-6)
    assert result["top1_accuracy"] < 0.5
    if keep_tail:
        assert result["num_bytes"] == len(text.encode())
        assert result["bits_per_byte"] == pytest.approx(nll_sum / math.log(2) / len(text.encode()), rel=1e-6)
        assert result["word_perplexity"] == pytest.approx(math.exp(nll_sum / len(text.split())), rel=1e-6)


def test_bytes_and_words_of_a_cut_text_are_those_of_what_is_left(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    result = evaluate(config, "max_windows=2")
    tokenizer = Tokenizer.from_file(str(tiny.folder / "tokenizer.json"))
    ids = tokenizer.encode(tiny.text.read_text(encoding="utf-8")).ids[:128]
    assert result["num_bytes"] == len(tokenizer.decode(ids).encode())
    assert not result["plan"]["whole"]


def test_smollm2_in_float32(smollm2, tmp_path):
    """The real model on real text, three windows of 512 tokens: ``softmax: torch`` gives what a plain loop
    gives, the default what float64 log-softmax of the same logits gives."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = tmp_path / "text.txt"
    from pydoc_data.topics import topics

    text.write_text("\n\n".join(topics[name] for name in sorted(topics))[:12_000], encoding="utf-8")

    def scored_by(softmax):
        output_dir = tmp_path / softmax
        arguments = ["dtype=fp32", "protocol.max_seq_len=512", "max_windows=3", "batch_size=2"]
        arguments += ["dataset=ppl_eval.data.text_files", f"dataset.paths=[{text}]"]
        arguments += [f"softmax={softmax}", f"output_dir={output_dir}"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert distributed_ppl_eval.run(["--config", "smollm2/135M_ppl", *arguments]) == 0
        return result_of(output_dir)

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(smollm2)(text.read_text(encoding="utf-8")).input_ids
    assert len(ids) >= 3 * 512
    nll_sum, exact_sum, num_tokens = reference(model, ids[: 3 * 512], 512)
    by_torch, exact = scored_by("torch"), scored_by("exact")
    assert by_torch["num_tokens"] == exact["num_tokens"] == num_tokens == 3 * 511
    assert (by_torch["softmax"], exact["softmax"]) == ("torch", "exact")
    assert by_torch["perplexity"] == pytest.approx(math.exp(nll_sum / num_tokens), rel=1e-6)
    assert exact["nll_sum"] == pytest.approx(exact_sum, rel=2e-7)
    assert abs(by_torch["nll_sum"] / exact_sum - 1) > 1e-6
    assert 5 < exact["perplexity"] < 40
