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


def test_attend_takes_it_only_where_it_is_faster(monkeypatch):
    q, k, v = queries_keys_values(1, 4, 2, 40, 16, torch.bfloat16)
    monkeypatch.setattr(host_attention, "_BFLOAT16_WITHOUT_TILES", True)
    assert torch.equal(attention.attend(q, k, v, queries_per_key=2), host_attention.causal(q, k, v, None, 2))
    monkeypatch.setattr(host_attention, "_BFLOAT16_WITHOUT_TILES", False)
    assert torch.equal(attention.attend(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert not host_attention.is_faster(q.float())


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
