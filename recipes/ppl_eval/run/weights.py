"""The hash of the model that all ranks together score, once they agree on it."""

import numpy as np
import numpy.typing as npt
import torch

from ppl_eval.checkpoints.weights_hash import MODULUS, WeightsHash
from ppl_eval.distributed.agreement import by_host
from ppl_eval.distributed.process_group import all_gather_rows
from ppl_eval.distributed.rendezvous import World
from ppl_eval.scoring.load import BuiltModel


def hashes_of(world: World, model: BuiltModel, device: torch.device) -> tuple[str, str | None]:
    """Agree on the hash of the model, and on that of its reference, if there is one."""
    own = agree_on_weights(world, model.weights, device)
    if model.reference is None:
        return own, None
    return own, agree_on_weights(world, model.reference.weights, device, "weights of the reference")


def agree_on_weights(world: World, weights: WeightsHash, device: torch.device, what: str = "weights") -> str:
    """Compare what the ranks read, and add up the parts of the model; all ranks must call it.

    Copies of the model are compared part by part. Where the model is in parts and there is one copy, no rank
    read what another did, and the hash is of the model that the parts make up.

    Returns:
        32 hexadecimal digits.

    Raises:
        Stop: if copies of the same part differ.
    """
    hosts = {rank: node.host for node in world.nodes for rank in node.ranks}

    def compare() -> str:
        return combine(all_gather_rows(weights.row(), world.world_size, device), hosts)

    return world.agree(what, compare)


def combine(rows: npt.NDArray[np.int64], hosts: dict[int, str]) -> str:
    """Return the hash of the whole model.

    Args:
        rows: ``WeightsHash.row`` of every rank.
        hosts: name of each rank's host.

    Raises:
        ValueError: if ranks that keep the same part read different weights.
    """
    copies: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank, row in enumerate(rows.view(np.uint64).tolist()):
        read, counted = row[1] << 64 | row[2], row[3] << 64 | row[4]
        copies.setdefault(row[0], {}).setdefault((read, counted), []).append(rank)
    differing = [found for found in copies.values() if len(found) > 1]
    if differing:
        listed = "; ".join(
            f"{read:032x} on {by_host({rank: hosts[rank] for rank in ranks})}"
            for (read, _), ranks in differing[0].items()
        )
        raise ValueError(
            f"weights differ between ranks: {listed}. A hash over all bytes that each rank read differs:"
            " download or copy the checkpoint again where it is the wrong one"
        )
    return f"{sum(counted for found in copies.values() for _, counted in found) % MODULUS:032x}"
