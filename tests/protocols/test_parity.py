"""Every protocol against its reference, live, in float32, on one tiny random model, to 1e-6 relative.

The references are lm-eval itself, or loops in plain torch and float64 written from what the tools do, one
window at a time.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from helpers.pipeline import score, texts, tiny_llama
from helpers.tiny_tokenizers import encoder_of, tiny_tokenizer
from ppl_eval import protocols

LIMIT = 1e-6
TEXTS = (
    "The cat sat on the mat; the dog, who had seen it sit there before, said nothing at all.\n" * 7,
    "Short.",
    "",
    "Ünïcödé and 漢字 and 🙂: bytes are not characters.\n\nA second paragraph, longer than the first. " * 5,
)


@pytest.fixture(scope="module")
def models():
    return tiny_llama()


@pytest.fixture(scope="module", params=[False, True], ids=["no_bos", "bos"])
def adds_bos(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(adds_bos: bool):
    return tiny_tokenizer("".join(TEXTS), adds_bos)


@pytest.fixture(scope="module")
def encoder(tokenizer, adds_bos: bool):
    return encoder_of(tokenizer, adds_bos)


def close(ours: float, reference: float) -> None:
    assert ours == pytest.approx(reference, rel=LIMIT)


@torch.no_grad()
def nll_of(model, sequence: list[int]) -> np.ndarray:
    """NLL in float64 of every token of a sequence but the first."""
    tokens_1T = torch.tensor([sequence])
    log_p_TV = F.log_softmax(model(tokens_1T[:, :-1]).logits[0].double(), dim=-1)
    return -log_p_TV.gather(1, tokens_1T[0, 1:, None])[:, 0].numpy()


# --- lm-eval ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_seq_len", [16, 33, 128])
def test_rolling_is_lm_evals_loglikelihood_rolling(
    models, tokenizer, encoder, tmp_path: Path, max_seq_len
) -> None:
    model, decoder = models
    # lm-eval would put the tokenizer's BOS after the prefix, which is BOS already.
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, max_length=max_seq_len, batch_size=2, add_bos_token=False
    )
    full = [text for text in TEXTS if text]
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(full)]
    theirs = harness.loglikelihood_rolling(requests, disable_tqdm=True)

    ours = score(protocols.rolling(max_seq_len), texts(*full), encoder, decoder, tmp_path)
    close(ours.totals.nll_sum, -sum(theirs))
    # Document by document, not only in sum.
    windows = protocols.rolling(max_seq_len).num_windows(np.diff(ours.data.offsets_D1))
    ends = np.cumsum(windows)
    for end, number, their in zip(ends, windows, theirs, strict=True):
        close(ours.windows.nll_sum_B[end - number : end].sum(), -their)
    assert ours.data.num_bytes_D.sum() == sum(len(text.encode()) for text in full)


# --- transformers, GPTQ and AWQ ---------------------------------------------------------------------------


@torch.no_grad()
def documentation_script(model, tokens: list[int], max_length: int, stride: int) -> tuple[float, float]:
    """The loop of the transformers documentation, and the exact mean beside it; nats per token."""
    ids = torch.tensor([tokens])
    nll_sum, num_counted, exact_sum, num_scored = torch.zeros((), dtype=torch.float64), 0, 0.0, 0
    previous_end = 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + max_length, len(tokens))
        window = ids[:, begin:end]
        labels = window.clone()
        labels[:, : -(end - previous_end)] = -100
        mean = model(window, labels=labels).loss.double()
        num_counted += int((labels != -100).sum()) - 1
        nll_sum += mean * (int((labels != -100).sum()) - 1)
        # transformers drops the first label of the window by its shift.
        num_here = int((labels[:, 1:] != -100).sum())
        exact_sum += float(mean) * num_here
        num_scored += num_here
        previous_end = end
        if end == len(tokens):
            break
    return float(nll_sum) / num_counted, exact_sum / num_scored


@pytest.mark.parametrize(("max_seq_len", "stride"), [(32, 32), (32, 16), (32, 31), (32, 3), (100, 33)])
def test_strided_is_the_documentation_loop(
    models, tokenizer, encoder, tmp_path: Path, max_seq_len, stride
) -> None:
    model, decoder = models
    tokens = tokenizer("\n\n".join(TEXTS)).input_ids
    # With windows side by side, a last one of a single token makes the script's mean NaN.
    assert len(tokens) % max_seq_len != 1
    published, exact = documentation_script(model, tokens, max_seq_len, stride)
    source = texts(*TEXTS)
    ours = score(protocols.strided(max_seq_len, stride), source, encoder, decoder, tmp_path)
    close(ours.totals.ce_loss(), exact)
    as_published = protocols.strided(max_seq_len, stride, weighting="hf_doc")
    figures = score(as_published, source, encoder, decoder, tmp_path).figures
    close(figures["ce_loss"], published)
    close(figures["perplexity"], math.exp(published))
    close(figures["perplexity_exact_weighting"], math.exp(exact))
    if 1 < stride < max_seq_len:
        assert abs(published - exact) > 10 * LIMIT, "this text cannot tell the two weightings apart"


@torch.no_grad()
def test_disjoint_is_the_loop_of_gptq_and_awq(models, tokenizer, encoder, tmp_path: Path) -> None:
    model, decoder = models
    size = 32
    ids = torch.tensor([tokenizer("\n\n".join(TEXTS)).input_ids])
    means = []
    for i in range(ids.numel() // size):
        window = ids[:, i * size : (i + 1) * size]
        logits = model(window).logits[:, :-1].float()
        means.append(F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).double() * size)
    reference = torch.exp(torch.stack(means).sum() / (len(means) * size))
    source = texts(*TEXTS)
    ours = score(protocols.disjoint(size), source, encoder, decoder, tmp_path)
    close(math.exp(ours.totals.ce_loss()), float(reference))
    assert ours.totals.num_tokens == len(means) * (size - 1)


def test_bos_before_each_window(models, tokenizer, encoder, tmp_path: Path) -> None:
    model, decoder = models
    size = 32
    tokens = tokenizer("\n\n".join(TEXTS), add_special_tokens=False).input_ids
    nll = [nll_of(model, [0, *tokens[b : b + size]]) for b in range(0, len(tokens) - size + 1, size)]
    source = texts(*TEXTS)
    ours = score(protocols.disjoint(size, bos="each_window"), source, encoder, decoder, tmp_path)
    close(ours.totals.nll_sum, float(np.concatenate(nll).sum()))
    assert ours.totals.num_tokens == len(nll) * size


# --- llama.cpp and Megatron -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 33])
def test_llama_cpp_is_its_rule(models, tokenizer, encoder, adds_bos, tmp_path: Path, size) -> None:
    model, decoder = models
    tokens = tokenizer("".join(TEXTS)).input_ids
    first = size // 2
    nll, nll2, count = 0.0, 0.0, 0
    for begin in range(0, len(tokens) - size + 1, size):
        chunk = tokens[begin : begin + size]
        if adds_bos:
            chunk[0] = tokenizer.bos_token_id
        for value in nll_of(model, chunk)[first:]:
            nll, nll2, count = nll + value, nll2 + value * value, count + 1
    nll, nll2 = nll / count, nll2 / count
    ours = score(protocols.llama_cpp(size), texts(*TEXTS), encoder, decoder, tmp_path)
    assert ours.totals.num_tokens == count
    close(ours.totals.ce_loss(), nll)
    stderr = math.exp(nll) * math.sqrt((nll2 - nll * nll) / (count - 1))
    close(ours.figures["perplexity_stderr_llama_cpp"], stderr)


@pytest.mark.parametrize(("size", "overlap"), [(32, 32), (32, 16), (32, 31), (33, 5)])
def test_megatron_is_its_overlapping_evaluation(
    models, tokenizer, encoder, tmp_path: Path, size, overlap
) -> None:
    model, decoder = models
    raw = "".join(TEXTS)
    tokens = tokenizer(raw, add_special_tokens=False).input_ids
    num_targets = len(tokens) - 1
    nll_sum = 0.0
    for i in range(max(math.ceil(max(num_targets - overlap, 0) / overlap) + 1, 1)):
        window = tokens[i * overlap : i * overlap + size + 1]
        # Padding stands for missing targets, and a mask of zeros keeps it out of the sum.
        mask = np.array([1.0] * (len(window) - 1) + [0.0] * (size + 1 - len(window)))
        if overlap != size and i != 0:
            mask[:-overlap] = 0
        padded = window + [tokenizer.eos_token_id] * (size + 1 - len(window))
        nll_sum += float((nll_of(model, padded) * mask).sum())
    num_words = len(raw.strip().split(" "))
    ours = score(protocols.megatron(size, overlap), texts(raw), encoder, decoder, tmp_path)
    close(ours.totals.ce_loss(), nll_sum / num_targets)
    assert ours.totals.num_tokens == num_targets
    close(
        ours.figures["adjusted_perplexity"], math.exp(nll_sum / num_targets * (num_targets / (num_words - 1)))
    )


def test_per_sample_is_token_weighted_validation_loss(models, tokenizer, encoder, tmp_path: Path) -> None:
    model, decoder = models
    full = [text for text in TEXTS if text]
    samples = [tokenizer(text).input_ids for text in full]
    nll = np.concatenate([nll_of(model, tokens) for tokens in samples if len(tokens) > 1])
    ours = score(protocols.per_sample(600, too_long="error"), texts(*full), encoder, decoder, tmp_path)
    close(ours.totals.ce_loss(), float(nll.mean()))
    assert ours.totals.num_tokens == len(nll)
