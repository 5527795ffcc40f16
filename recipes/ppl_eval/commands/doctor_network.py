"""Names, ports, interfaces, latencies and bandwidths: what the network between ranks gives."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ppl_eval.commands.doctor import Finding
from ppl_eval.distributed.process import connect
from ppl_eval.distributed.process_group import be_patient, process_group
from ppl_eval.distributed.rendezvous import World, meet
from ppl_eval.metrics.totals import NUM_LIMBS, Totals

_ROUNDS = 5
_MOST_PAIRS = 32
_CONNECT_SECONDS = 3.0


@contextmanager
def ranks_of_torchrun() -> Iterator[tuple[World, torch.device]]:
    """Form the process group that a run would form."""
    process = connect(60)
    world, _ = meet(process, lambda: None, lambda _: {})
    device = torch.device("cuda", world.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    with process_group(world, device, None):
        be_patient(world)
        yield world, device
    world.leave()


def reach(nodes: list[str], port: int) -> list[Finding]:
    """Resolve names of nodes and try a port of each, from this machine alone."""
    findings = []
    for node in nodes:
        try:
            addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(node, port)})
        except OSError as error:
            findings.append(Finding(node, "a name", str(error), "mend DNS or /etc/hosts, or use an address"))
            continue
        remedy = ""
        if all(address.startswith("127.") or address == "::1" for address in addresses) and len(nodes) > 1:
            remedy = "other nodes cannot reach this: the name stands for the machine itself"
        findings.append(Finding(node, "a name", ", ".join(addresses), remedy))
        began = time.monotonic()
        try:
            with socket.create_connection((node, port), _CONNECT_SECONDS):
                found = f"answers after {1e3 * (time.monotonic() - began):.1f} ms"
        except ConnectionRefusedError:
            found = "reachable, nothing listens (as it should be before a run)"
        except OSError as error:
            findings.append(
                Finding(f"{node}:{port}", "reachable", str(error), "open the port in the firewall")
            )
            continue
        findings.append(Finding(f"{node}:{port}", "reachable", found))
    return findings


def network(world: World, device: torch.device) -> list[Finding]:
    """Measure the latency between each two ranks; findings on rank 0."""
    master = f"{os.environ.get('MASTER_ADDR', 'none')}:{os.environ.get('MASTER_PORT', 'none')}"
    findings = [
        Finding("rendezvous", "", master),
        Finding("ranks", "", ", ".join(f"{node.host}: {len(node.ranks)}" for node in world.nodes)),
        Finding(
            "backend",
            "",
            f"{dist.get_backend()}, interface {os.environ.get('GLOO_SOCKET_IFNAME', 'default')}",
        ),
    ]
    size = min(world.world_size, _MOST_PAIRS)
    latency = torch.zeros(world.world_size, world.world_size, dtype=torch.float64)
    for first in range(size):
        for second in range(first + 1, size):
            if world.rank in (first, second):
                latency[first, second] = _ping(
                    world.rank == first, second if world.rank == first else first, device
                )
            dist.barrier()
    latency = latency.to(device)
    dist.all_reduce(latency, dist.ReduceOp.MAX)
    hosts = {rank: node.host for node in world.nodes for rank in node.ranks}
    pairs = [(float(latency[a, b]), a, b) for a in range(size) for b in range(a + 1, size)]
    if not pairs:
        return findings
    median = statistics.median(seconds for seconds, _, _ in pairs)
    findings.append(Finding("median round trip", "", f"{1e6 * median:.0f} us over {len(pairs)} pairs"))
    for seconds, a, b in sorted(pairs, reverse=True)[:3]:
        where = f"rank {a} ({hosts[a]}) to rank {b} ({hosts[b]})"
        slow = seconds > 10 * median and seconds > 1e-3
        remedy = "ten times the median: look at this pair's cable, switch or interface" if slow else ""
        findings.append(Finding(where, "like the others", f"{1e6 * seconds:.0f} us", remedy))
    return findings


def _ping(first: bool, peer: int, device: torch.device) -> float:
    token = torch.zeros(1, dtype=torch.int64, device=device)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        if first:
            dist.send(token, peer)
            dist.recv(token, peer)
        else:
            dist.recv(token, peer)
            dist.send(token, peer)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def bench(world: World, device: torch.device, largest_bytes: int) -> list[Finding]:
    """Time collectives by size, and the one vector that a run reduces in exact and in compressed form."""
    findings = []
    size = 1 << 10
    while size <= largest_bytes:
        findings += [_collective(name, world.world_size, device, size) for name in _COLLECTIVES]
        size <<= 5
    vector = torch.from_numpy(Totals().pack()).to(device)
    exact = _seconds(lambda: dist.all_reduce(vector), device)
    half = torch.zeros(len(vector) // NUM_LIMBS, dtype=torch.float16, device=device)
    compressed = _seconds(lambda: dist.all_reduce(half), device)
    findings.append(
        Finding(
            "the vector of a run",
            "once a run",
            f"{vector.nbytes} bytes of int64: {1e6 * exact:.0f} us; as float16, {half.nbytes} bytes:"
            f" {1e6 * compressed:.0f} us. Compression cannot help: it is sent once",
        )
    )
    return findings


def _all_gather(tensor: torch.Tensor, world_size: int) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(world_size)], tensor)


# What to call, and the share of the size that crosses a rank's link (nccl-tests, doc/PERFORMANCE.md).
_COLLECTIVES: dict[str, tuple[Callable[[torch.Tensor, int], object], Callable[[int], float]]] = {
    "all_reduce": (lambda tensor, _: dist.all_reduce(tensor), lambda ranks: 2 * (ranks - 1) / ranks),
    "all_gather": (_all_gather, lambda ranks: float(ranks - 1)),
    "broadcast": (lambda tensor, _: dist.broadcast(tensor, 0), lambda ranks: 1.0),
}


def _collective(name: str, ranks: int, device: torch.device, num_bytes: int) -> Finding:
    call, share = _COLLECTIVES[name]
    tensor = torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
    seconds = _seconds(lambda: call(tensor, ranks), device)
    rate = num_bytes * share(ranks) / seconds / 1e9
    return Finding(f"{name}, {num_bytes >> 10:,} KiB", "", f"{1e6 * seconds:,.0f} us, {rate:.2f} GB/s a link")


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # The first makes connections.
