"""The groups of ranks that a run forms before it reads anything."""

from contextlib import ExitStack

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppl_eval.config.settings import Settings
from ppl_eval.distributed import collectives, process_group
from ppl_eval.distributed.rendezvous import World
from ppl_eval.parallel.parallel_dims import ParallelDims


def join_groups(
    settings: Settings, world: World, device: torch.device, dims: ParallelDims, resources: ExitStack
) -> tuple[collectives.AddOverRanks, DeviceMesh | None]:
    """Form the process group and its parts, and send a first message through each.

    Args:
        settings: of the run.
        world: all ranks.
        device: where this rank computes.
        dims: degrees of parallelism.
        resources: leaves the process group when the run ends.

    Returns:
        What sums a vector over ranks, and the mesh of a model that is split.

    Raises:
        ValueError: if ranks do not reach each other.
    """
    resources.enter_context(process_group.process_group(world, device, settings.backend))
    ranks_of_nodes = [node.ranks for node in world.nodes]
    with process_group.naming_network(world, process_group.choose_backend(device, settings.backend)):
        add_over_ranks = collectives.add_over_ranks(
            ranks_of_nodes, world.rank, device, settings.aggregation.topology
        )
        mesh = dims.build_mesh(device.type)
        process_group.check_groups(add_over_ranks, mesh, world)
    process_group.be_patient(world)
    return add_over_ranks, mesh
