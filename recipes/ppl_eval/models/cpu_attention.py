"""Causal attention for bfloat16 on CPUs without matrix tiles, where torch's own kernel runs at float32's
speed.

There ``scaled_dot_product_attention`` multiplies in float32 throughout. Here only the scores are made so (in
bfloat16 they would be rounded), and the probabilities, which the kernel rounds to bfloat16 too, meet the
values in bfloat16 products, which are twice as fast. Grouped queries share one product with their key head.
"""

import math

import torch
from torch import Tensor

# Scores that exist at once. A few MiB stay in a processor's cache between the four passes over them.
_SCORES_BYTES = 8 * 2**20
_MAX_ROWS, _MIN_ROWS = 128, 32

_BFLOAT16_WITHOUT_TILES = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def is_faster(q_BHTD: Tensor) -> bool:
    """Return whether ``causal`` beats torch's kernel for such queries: in bfloat16 on a CPU that has products
    for it, but not the tiles (AMX) that torch's kernel would use."""
    return _BFLOAT16_WITHOUT_TILES and q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16


def causal(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float | None, queries_per_key: int = 1
) -> Tensor:
    """Compute softmax(scale * q k^T, causal) v.

    Blocks are cut by the shapes alone, so that no bit depends on the number of threads.

    Args:
        q_BHTD: queries; B batch, H heads, T positions, D head size.
        k_BHTD: keys, repeated for grouped queries.
        v_BHTD: values, likewise.
        scale: factor on the scores; None for D ** -0.5.
        queries_per_key: how many heads in a row have the same keys and values.

    Returns:
        The attended values, [B, H, T, D], in the dtype of the values.
    """
    num_batch, num_heads, num_positions, dim = q_BHTD.shape
    group, num_keys = queries_per_key, num_batch * num_heads // queries_per_key
    # K key heads of all sequences, G query heads for each.
    q_KGTD = (q_BHTD.float() * (dim**-0.5 if scale is None else scale)).reshape(
        num_keys, group, num_positions, dim
    )
    k_KDT = k_BHTD[:, ::group].float().reshape(num_keys, num_positions, dim).transpose(1, 2)
    v_KTD = v_BHTD[:, ::group].reshape(num_keys, num_positions, dim)
    out_KGTD = torch.empty_like(q_KGTD, dtype=v_BHTD.dtype)

    row_bytes = 4 * group * num_positions
    rows = max(_MIN_ROWS, min(_MAX_ROWS, _SCORES_BYTES // row_bytes))
    keys_at_once = max(1, _SCORES_BYTES // (row_bytes * rows))
    scores = torch.empty(min(keys_at_once, num_keys) * group * rows * num_positions)
    weights = torch.empty_like(scores, dtype=v_BHTD.dtype)
    future_RR = torch.full((rows, rows), -math.inf).triu_(1)
    for first in range(0, num_keys, keys_at_once):
        heads = slice(first, min(first + keys_at_once, num_keys))
        for begin in range(0, num_positions, rows):
            end = min(begin + rows, num_positions)
            q_KND = q_KGTD[heads, :, begin:end].flatten(1, 2)
            shape = (*q_KND.shape[:2], end)
            scores_KNS = scores[: math.prod(shape)].view(shape)
            weights_KNS = weights[: math.prod(shape)].view(shape)
            torch.bmm(q_KND, k_KDT[heads, :, :end], out=scores_KNS)
            scores_KNS.unflatten(1, (group, -1))[..., begin:] += future_RR[: end - begin, : end - begin]
            torch.softmax(scores_KNS, dim=-1, out=scores_KNS)
            weights_KNS.copy_(scores_KNS)
            out_KGTD[heads, :, begin:end] = torch.bmm(weights_KNS, v_KTD[heads, :end]).unflatten(
                1, (group, -1)
            )
    return out_KGTD.view(num_batch, num_heads, num_positions, dim)
