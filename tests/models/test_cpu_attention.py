"""The CPU's own causal attention against torch's in float64, at all the edges of its blocks."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ppl_eval.models import attention
from ppl_eval.models import cpu_attention as host_attention


def queries_keys_values(batch, heads, group, length, dim, dtype):
    torch.manual_seed(length)
    q = torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2)
    shape = (batch, length, heads // group, dim)
    k, v = (torch.randn(shape).to(dtype).repeat_interleave(group, dim=2).transpose(1, 2) for _ in "kv")
    return q, k, v


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 128, 129, 300])
@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 9, 3), (3, 4, 4), (2, 3, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_float64(length, batch, heads, group, scale):
    q, k, v = queries_keys_values(batch, heads, group, length, 16, torch.float32)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=scale)
    actual = host_attention.causal(q, k, v, scale, group)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)


def test_little_memory_for_scores_changes_the_blocks_and_not_the_values(monkeypatch):
    q, k, v = queries_keys_values(2, 4, 2, 200, 16, torch.float32)
    at_once = host_attention.causal(q, k, v, None, 2)
    monkeypatch.setattr(host_attention, "_SCORES_BYTES", 4 * 2 * 200 * 40)
    torch.testing.assert_close(host_attention.causal(q, k, v, None, 2), at_once, rtol=0, atol=1e-6)


def test_in_bfloat16_as_close_as_torchs_kernel():
    q, k, v = queries_keys_values(1, 8, 2, 513, 64, torch.bfloat16)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)

    def error(actual):
        return ((actual.double() - expected).norm() / expected.norm()).item()

    assert error(host_attention.causal(q, k, v, None, 2)) < 1.3 * error(
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_attend_takes_the_bfloat16_kernel_only_where_it_is_faster(monkeypatch):
    q, k, v = queries_keys_values(1, 4, 2, 40, 16, torch.bfloat16)
    monkeypatch.setattr(host_attention, "_BFLOAT16_WITHOUT_TILES", True)
    assert torch.equal(attention.attend(q, k, v, queries_per_key=2), host_attention.causal(q, k, v, None, 2))
    monkeypatch.setattr(host_attention, "_BFLOAT16_WITHOUT_TILES", False)
    assert torch.equal(attention.attend(q, k, v), host_attention.merged(q, k, v, None))
    assert not host_attention.is_faster(q.float())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 513, 1100])
@pytest.mark.parametrize("window", [None, 1, 50, 64, 200, 5000])
def test_merged_blocks_equal_float64(length, window):
    q, k, v = queries_keys_values(2, 4, 2, length, 16, torch.float32)
    age = torch.arange(length)[:, None] - torch.arange(length)
    seen = (age >= 0) & (age < (window or length))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen, scale=0.3)
    actual = host_attention.merged(q, k, v, 0.3, window)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)
    bfloat16 = host_attention.causal(q, k, v, 0.3, 2, window=window)
    torch.testing.assert_close(bfloat16.double(), expected, rtol=0, atol=2e-6)


KERNELS = {
    "merged": lambda q, k, v, **window: host_attention.merged(q, k, v, None, **window),
    "causal": lambda q, k, v, **window: host_attention.causal(q, k, v, None, 2, **window),
    "softcap": lambda q, k, v, **window: attention.attend(q, k, v, softcap=20.0, **window),
}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("merged", torch.float32),
        ("merged", torch.bfloat16),
        ("merged", torch.float64),
        ("causal", torch.bfloat16),
        ("softcap", torch.float32),
        ("softcap", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("window", [None, 100, 300])
def test_what_comes_after_a_position_and_beside_it_changes_no_bit(kernel, dtype, window):
    q, k, v = queries_keys_values(3, 4, 2, 1100, 64, dtype)
    attend, threads = KERNELS[kernel], torch.get_num_threads()
    expected = attend(q, k, v, window=window)
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            for length in (8, 24, 40, 96, 100, 128, 136, 200, 208, 256, 272, 512, 528, 768, 784, 1040):
                row = length % 3
                cut = [x[row : row + 1, :, :length].clone() for x in (q, k, v)]
                assert torch.equal(attend(*cut, window=window)[0], expected[row, :, :length]), length
    finally:
        torch.set_num_threads(threads)


def test_blocks_of_few_rows_are_cut_by_position_alone(monkeypatch):
    monkeypatch.setattr(host_attention, "_SCORES_BYTES", 4 * 2 * 64 * 256)
    q, k, v = queries_keys_values(1, 4, 2, 700, 16, torch.bfloat16)
    expected = host_attention.causal(q, k, v, None, 2)
    for length in (100, 200, 300, 512, 640):
        cut = (x[:, :, :length].clone() for x in (q, k, v))
        assert torch.equal(host_attention.causal(*cut, None, 2), expected[:, :, :length])


SCRIPT = """
import ppl_eval  # sets MKL's reproducible mode, which is read at its first call
import torch
from ppl_eval.models.cpu_attention import causal

for heads, group, length in ((9, 3, 255), (8, 4, 64), (3, 1, 1023)):
    q, k, v = (torch.randn(2, heads, length, 64, dtype=torch.bfloat16) for _ in "qkv")
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(causal(q, k, v, None, group))
    assert torch.equal(*results), (heads, group, length)
"""


def test_one_thread_and_two_give_the_same_bits():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
