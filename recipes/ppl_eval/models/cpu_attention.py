"""Causal attention on a CPU in blocks of fixed shapes, so that no bit depends on the batch or on padding.

torch's own kernel cuts a sequence by its length, so that a window padded to 256 tokens has other bits than
one padded to 208. Here queries are cut by their position alone, and the last block is filled up with zeros:
kernels see the same shapes for a position whatever comes after it. There are two ways to compute a block.

- ``merged`` calls torch's flash kernel twice a block, for the keys before the block and for those in it, and
  joins the two by their log-sum-exp (Dao et al., FlashAttention, arXiv:2205.14135, section 3.1). It takes as
  long as torch's kernel over the whole sequence.
- ``causal`` is for bfloat16 on CPUs without matrix tiles, where torch's kernel multiplies in float32
  throughout. Only the scores are made so (in bfloat16 they would be rounded), and the probabilities, which
  the kernel rounds to bfloat16 too, meet the values in bfloat16 products, which are twice as fast. Grouped
  queries share one product with their key head.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores that exist at once in `causal`. A few MiB stay in a processor's cache between the four passes.
_SCORES_BYTES = 8 * 2**20
_MAX_ROWS, _MIN_ROWS = 128, 32
# (first position, queries in a block from there on) in `merged`: few where a window may be short, as the last
# block is filled up.
_BLOCKS = ((0, 64), (512, 128), (1024, 256))

_BFLOAT16_WITHOUT_TILES = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def is_faster(q_BHTD: Tensor) -> bool:
    """Return whether ``causal`` beats torch's kernel for such queries: in bfloat16 on a CPU that has products
    for it, but not the tiles (AMX) that torch's kernel would use."""
    return _BFLOAT16_WITHOUT_TILES and q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16


def merged(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    """Compute softmax(scale * q k^T, causal) v with torch's kernel for CPUs.

    Args:
        q_BHTD: queries; B batch, H heads, T positions, D head size; floating point.
        k_BHTD: keys, repeated for grouped queries.
        v_BHTD: values, likewise.
        scale: factor on the scores; None for D ** -0.5.
        window: number of keys a query sees, itself included; None for all.

    Returns:
        The attended values, [B, H, T, D], in the dtype of the values.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    num_positions = q_BHTD.shape[2]
    out_BHTD = torch.empty_like(q_BHTD)
    for begin, end in blocks(num_positions):
        stop = min(end, num_positions)
        q, k, v = (filled(x_BHTD[:, :, begin:stop], end - begin) for x_BHTD in (q_BHTD, k_BHTD, v_BHTD))
        if window is not None and end > window:
            first = max(0, begin - window + 1)
            k, v = (
                torch.cat([x_BHTD[:, :, first:begin], own], dim=2)
                for x_BHTD, own in ((k_BHTD, k), (v_BHTD, v))
            )
            age_RS = torch.arange(begin, end)[:, None] - torch.arange(first, end)
            seen_RS = (age_RS >= 0) & (age_RS < window)
            own = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_RS, scale=scale)
        else:
            own, own_lse = attend(q, k, v, 0.0, True, scale=scale)
            if begin:
                earlier = k_BHTD[:, :, :begin], v_BHTD[:, :, :begin]
                before, before_lse = attend(q, *earlier, 0.0, False, scale=scale)
                own = own + (before - own) * torch.sigmoid(before_lse - own_lse).unsqueeze(-1)
        out_BHTD[:, :, begin:stop] = own[:, :, : stop - begin]
    return out_BHTD


def blocks(num_positions: int) -> Iterator[tuple[int, int]]:
    """Cut a sequence into [begin, end) by position alone; the last block may go beyond its end."""
    begin = 0
    while begin < num_positions:
        rows = next(rows for first, rows in reversed(_BLOCKS) if first <= begin)
        yield begin, begin + rows
        begin += rows


def filled(x_BHTD: Tensor, num_positions: int) -> Tensor:
    """Fill up with zeros to so many positions."""
    missing = num_positions - x_BHTD.shape[2]
    return F.pad(x_BHTD, (0, 0, 0, missing)) if missing else x_BHTD


def causal(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    scale: float | None,
    queries_per_key: int = 1,
    *,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T, causal) v.

    Blocks are cut by position and by the size of groups alone, so that no bit depends on the number of
    threads, on the batch or on padding.

    Args:
        q_BHTD: queries; B batch, H heads, T positions, D head size.
        k_BHTD: keys, repeated for grouped queries.
        v_BHTD: values, likewise.
        scale: factor on the scores; None for D ** -0.5.
        queries_per_key: how many heads in a row have the same keys and values.
        window: number of keys a query sees, itself included; None for all.

    Returns:
        The attended values, [B, H, T, D], in the dtype of the values.
    """
    num_batch, num_heads, num_given, dim = q_BHTD.shape
    num_positions = -(-num_given // _MIN_ROWS) * _MIN_ROWS
    q_BHTD, k_BHTD, v_BHTD = (filled(x_BHTD, num_positions) for x_BHTD in (q_BHTD, k_BHTD, v_BHTD))
    group, num_keys = queries_per_key, num_batch * num_heads // queries_per_key
    # K key heads of all sequences, G query heads for each.
    q_KGTD = (q_BHTD.float() * (dim**-0.5 if scale is None else scale)).reshape(
        num_keys, group, num_positions, dim
    )
    k_KDT = k_BHTD[:, ::group].float().reshape(num_keys, num_positions, dim).transpose(1, 2)
    v_KTD = v_BHTD[:, ::group].reshape(num_keys, num_positions, dim)
    out_KGTD = torch.empty_like(q_KGTD, dtype=v_BHTD.dtype)
    scores, weights = torch.empty(0), v_BHTD.new_empty(0)
    begin = 0
    while begin < num_positions:
        rows = _rows_at(begin, group)
        end = min(begin + rows, num_positions)
        first = 0 if window is None else max(0, begin - window + 1)
        hidden_RS = _hidden(begin, end, first, window)
        keys_at_once = max(1, _SCORES_BYTES // (4 * group * rows * (end - first)))
        for head in range(0, num_keys, keys_at_once):
            heads = slice(head, min(head + keys_at_once, num_keys))
            q_KND = q_KGTD[heads, :, begin:end].flatten(1, 2)
            shape = (*q_KND.shape[:2], end - first)
            scores_KNS, weights_KNS = (buffer.resize_(shape) for buffer in (scores, weights))
            torch.bmm(q_KND, k_KDT[heads, :, first:end], out=scores_KNS)
            scores_KNS.unflatten(1, (group, -1))[..., end - first - hidden_RS.shape[1] :] += hidden_RS
            torch.softmax(scores_KNS, dim=-1, out=scores_KNS)
            weights_KNS.copy_(scores_KNS)
            out_KND = torch.bmm(weights_KNS, v_KTD[heads, first:end])
            out_KGTD[heads, :, begin:end] = out_KND.unflatten(1, (group, -1))
        begin = end
    return out_KGTD.view(num_batch, num_heads, num_positions, dim)[:, :, :num_given]


def _hidden(begin: int, end: int, first: int, window: int | None) -> Tensor:
    """Return what is added to the scores of queries [begin, end): minus infinity for keys that they do not
    see; of the last columns of the keys [first, end), as many as need it."""
    if window is None or end <= window:
        first = begin
    age_RS = torch.arange(begin, end)[:, None] - torch.arange(first, end)
    unseen_RS = age_RS < 0
    if window is not None:
        unseen_RS |= age_RS >= window
    return torch.zeros(unseen_RS.shape).masked_fill_(unseen_RS, -math.inf)


def _rows_at(begin: int, group: int) -> int:
    # Of these rows the scores of one key head fit, as far as `_MIN_ROWS` lets them.
    rows = _MAX_ROWS
    while rows > _MIN_ROWS and 4 * group * rows * (begin + rows) > _SCORES_BYTES:
        rows //= 2
    return rows
