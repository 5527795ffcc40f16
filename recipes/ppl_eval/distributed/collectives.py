"""Sums over ranks: flat or node by node, and a weighted mean that is right for groups of unequal size.

Topology is about the network, never about the number: int64 sums are the same bits either way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ppl_eval.metrics.totals import (
    FRACTION_BITS,
    FloatSum,
    from_limbs,
    resolve_precision,
    to_fixed,
    to_limbs,
)

Array = npt.NDArray[Any]
AddOverRanks = Callable[[Array], Array]


def add_over_ranks(nodes: list[list[int]], rank: int, device: torch.device, topology: str) -> AddOverRanks:
    """Make the function that sums a vector over all ranks.

    Args:
        nodes: ranks of each node, together all ranks; nodes may differ in size.
        rank: this rank.
        device: where the backend wants tensors.
        topology: ``flat`` is one all-reduce. ``hierarchical`` reduces to the first rank of each node, then
            over these, then hands the sum back: the slow network carries one vector a node.

    Returns:
        A function from a vector (int64, float64 or float32) to its sum over ranks in the same dtype. It is a
        collective: every rank must call it.
    """
    reduce_ = _all_reduce if topology == "flat" else _by_node(nodes, rank)

    def add(values: Array) -> Array:
        tensor = torch.from_numpy(np.array(values, order="C")).to(device)
        reduce_(tensor)
        return tensor.cpu().numpy()

    return add


def _all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _by_node(nodes: list[list[int]], rank: int) -> Callable[[torch.Tensor], None]:
    (node,) = (ranks for ranks in nodes if rank in ranks)
    # Only the members of a group take part in making it: on a thousand ranks there are hundreds of nodes.
    group = dist.new_group(node, use_local_synchronization=True)
    leaders = None
    if rank == node[0]:
        leaders = dist.new_group([ranks[0] for ranks in nodes], use_local_synchronization=True)

    def reduce_(tensor: torch.Tensor) -> None:
        dist.reduce(tensor, dst=node[0], group=group)
        if leaders is not None:
            dist.all_reduce(tensor, group=leaders)
        dist.broadcast(tensor, src=node[0], group=group)

    return reduce_


def adaptive_aggregation(
    values_N: Array, weights_N: Array, precision: str = "exact", add: AddOverRanks = lambda vector: vector
) -> float:
    """Weighted mean over the values of all ranks: sum of value x weight over sum of weights, one division.

    A mean of the ranks' means would weigh a rank with 1 token like one with a million.

    Example:
        Windows of 3, 1 and 0 tokens, with mean NLL 1, 5 and anything:

        >>> adaptive_aggregation(np.array([1.0, 5.0, 9.0]), np.array([3, 1, 0]))
        2.0

    Args:
        values_N: this rank's values, for example mean NLL of windows, nats; float64. May be empty.
        weights_N: their weights, for example scored tokens; whole numbers.
        precision: of the sum of products: ``exact`` (integers), ``float64``, ``float32``, or ``auto``
            (float64 if the weights of all ranks add up to more than 10^6, else float32).
        add: sums a vector over ranks (``add_over_ranks``); left out, there is one process.

    Raises:
        ValueError: if a weight is negative or not whole, or all weights of all ranks are zero.
    """
    values_N, weights_N = np.asarray(values_N, dtype=np.float64), np.asarray(weights_N)
    whole_N = weights_N.astype(np.int64)
    assert values_N.shape == whole_N.shape
    good = bool((whole_N == weights_N).all() and (whole_N >= 0).all())
    products = sum(to_fixed(np.array([v])) * int(w) for v, w in zip(values_N, whole_N, strict=True))
    limbs = to_limbs(int(products)) if good else to_limbs(0)
    # A rank that knows of a mistake still takes part, or the others would wait for it.
    vector = add(np.array([not good, *to_limbs(int(whole_N.sum()) if good else 0), *limbs], dtype=np.int64))
    if vector[0]:
        raise ValueError("weights must be whole numbers of 0 or more, such as token counts")
    weight, product = (from_limbs(list(limbs)) for limbs in np.split(vector[1:], 2))
    if weight == 0:
        raise ValueError("all weights are zero: there is nothing to take the mean of")
    precision = resolve_precision(precision, weight)
    if precision == "exact":
        return product / (weight << FRACTION_BITS)
    running = FloatSum(precision)
    running.add(values_N * whole_N)
    return float(add(running.value.reshape(1))[0] / running.value.dtype.type(weight))
