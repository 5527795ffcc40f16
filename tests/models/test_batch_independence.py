"""A window has the same bits alone and in a batch, however far it is padded and whatever the threads."""

import pytest
import torch

from helpers.family_models import CASES, SIZES, build, checkpoint
from ppl_eval.models.engines import scorable
from ppl_eval.scoring.load import prepare_for_device
from ppl_eval.scoring.nll import ScoringModel

# Windows are cut to these; the longest is the model's whole context.
LENGTHS = (128, 77, 9, 33, 64, 120, 16)


def windows():
    random = torch.Generator().manual_seed(5)
    return [torch.randint(3, SIZES["vocab_size"], (length + 1,), generator=random) for length in LENGTHS]


def score(model, chosen, width):
    """NLL of each window's tokens, all windows in one batch of so many positions."""
    tokens_BT = torch.zeros(len(chosen), width, dtype=torch.int64)
    labels_BT = torch.full_like(tokens_BT, -100)
    for row, window in enumerate(chosen):
        length = len(window) - 1
        tokens_BT[row, :length], labels_BT[row, :length] = window[:-1], window[1:]
    nll_N, _ = model(tokens_BT, labels_BT)
    return nll_N.split([len(window) - 1 for window in chosen])


def batches(num_windows):
    """Batches of 1, 2, 3 and all windows, sorted by length and not."""
    order = sorted(range(num_windows), key=LENGTHS.__getitem__)
    for size in (1, 2, 3, num_windows):
        for ids in (list(range(num_windows)), order):
            yield from (ids[first : first + size] for first in range(0, num_windows, size))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# LongRoPE turns to other factors by the length of the whole batch, as in transformers.
@pytest.mark.parametrize("case", [case for case in CASES if "longrope" not in str(case.settings)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_batch_padding_and_threads_change_no_bit(case, dtype):
    decoder, *_ = build(case, checkpoint(case.name), dtype)
    prepare_for_device(decoder, torch.device("cpu"), compiled=False)
    model = ScoringModel(decoder, max_logits_bytes=2**16)
    assert model.model.batch_dependence(torch.device("cpu")) is None
    texts = windows()
    torch.set_num_threads(1)
    expected = [score(model, [text], len(text) - 1)[0] for text in texts]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for ids in batches(len(texts)):
            longest = max(LENGTHS[window] for window in ids)
            for width in {longest, 128}:
                found = score(model, [texts[window] for window in ids], width)
                for window, nll_T in zip(ids, found, strict=True):
                    assert torch.equal(nll_T, expected[window]), (threads, ids, width, window)


@pytest.mark.parametrize(
    ("name", "dtype", "device", "told"),
    [
        ("llama3_2", torch.float64, "cpu", "products in float64"),
        ("llama3_2", torch.float32, "cuda", "kernels of this cuda device"),
        ("phi3", torch.float32, "cpu", "LongRoPE"),
    ],
)
def test_where_nothing_is_promised_the_reason_is_told(name, dtype, device, told):
    case = next(
        case
        for case in CASES
        if case.name.startswith(name) and ("longrope" in str(case.settings)) == (name == "phi3")
    )
    decoder, *_ = build(case, checkpoint(case.name), dtype)
    prepare_for_device(decoder, torch.device("cpu"), compiled=False)
    assert told in (scorable(decoder).batch_dependence(torch.device(device)) or "")
