"""What a record of every token adds to its NLL: the target's rank, the most likely token, and the entropy.

A few rows at a time, so that beside the chunk of logits in hand only as many rows exist once more.
"""

import numpy as np
import torch

# On a CPU rows stay in its cache from one operation to the next; a GPU wants larger pieces.
_CPU_ROWS, _CHUNK_PARTS = 4, 16


def row_groups(rows_NV: torch.Tensor) -> list[slice]:
    """Return the slices of rows that are looked at together."""
    num_rows = len(rows_NV)
    step = _CPU_ROWS if rows_NV.device.type == "cpu" else max(1, num_rows // _CHUNK_PARTS)
    return [slice(first, first + step) for first in range(0, num_rows, step)]


def count_above(logits_NV: torch.Tensor, value_N: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
    """Count the logits that come before a target in descending order, of equals those with a lower id.

    Args:
        logits_NV: logits; float32.
        value_N: the targets' logits.
        column_N: the targets' columns; outside of [0, V) where another rank has them.

    Returns:
        int64 [N]; 0 for the most likely token, as in argmax.
    """
    num_columns = logits_NV.shape[1]
    column_N = column_N.clamp(0, num_columns)
    if logits_NV.device.type == "cpu":
        rows, values = logits_NV.numpy(), value_N.numpy()
        counts = [
            np.count_nonzero(row[:column] >= value) + np.count_nonzero(row[column:] > value)
            for row, value, column in zip(rows, values, column_N.tolist(), strict=True)
        ]
        return torch.tensor(counts, dtype=torch.int64)
    column_V = torch.arange(num_columns, device=logits_NV.device)
    parts = []
    for group in row_groups(logits_NV):
        logits_KV, value_K1 = logits_NV[group], value_N[group, None]
        equal_KV = (logits_KV == value_K1) & (column_V < column_N[group, None])
        parts.append(((logits_KV > value_K1) | equal_KV).sum(dim=1))
    return torch.cat(parts)


def first_largest(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the column of each row's largest logit, of equals the first; int64 [N]."""
    if logits_NV.device.type == "cpu":
        # Several times as fast as torch's along a row.
        return torch.from_numpy(logits_NV.numpy().argmax(axis=1))
    return logits_NV.argmax(dim=1)


def exp_sums(logits_NV: torch.Tensor, max_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over v of e^(x_v - m) and of e^(x_v - m) (x_v - m), added up in trees.

    Args:
        logits_NV: logits x, float32; overwritten.
        max_N: m, the largest logit of each row.

    Returns:
        Both sums; float32 [N]. The first has the bits of ``nll.sum_rows`` over the whole chunk. Entropy in
        nats is its logarithm less the second over the first.
    """
    sums, weighted = torch.empty_like(max_N), torch.empty_like(max_N)
    groups = row_groups(logits_NV)
    buffer_KV = torch.empty_like(logits_NV[groups[0]]) if groups else logits_NV
    for group in groups:
        shifted_KV = logits_NV[group].sub_(max_N[group, None])
        exp_KV = torch.exp(shifted_KV, out=buffer_KV[: len(shifted_KV)])
        sums[group] = sum_rows(exp_KV)
        weighted[group] = sum_rows(exp_KV.mul_(shifted_KV))
    if weighted.isnan().any():
        # A logit of minus infinity has probability 0 and adds nothing: 0 * -inf.
        for row in weighted.isnan().nonzero().flatten().tolist():
            shifted_1V = logits_NV[row, None].clamp(min=torch.finfo(torch.float32).min)
            weighted[row] = sum_rows(shifted_1V.exp().mul_(shifted_1V))[0]
    return sums, weighted


def sum_rows(values_NV: torch.Tensor) -> torch.Tensor:
    """Sum each row in a tree, with the same bits for any number of threads."""
    if len(values_NV) == 1:
        # torch divides the sum of a single row among its threads, and its bits depend on their number.
        return torch.cat([values_NV, values_NV]).sum(dim=1)[:1]
    return values_NV.sum(dim=1)
