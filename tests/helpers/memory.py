"""What the parts of a split model take in memory, measured on real processes from Linux's own counts."""

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder

from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.parallel.fsdp import return_freed_memory
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring.split import SplitModel, split_model

CPU = torch.device("cpu")
MIB = 2**20
MAX_LOGITS_BYTES = 4 * MIB
# Eight layers of 28 MiB each, and 16 MiB of tied embedding, in float32.
WIDE = {"vocab_size": 4096, "num_layers": 8, "num_heads": 16, "num_kv_heads": 16, "embed_dim": 1024}
# Little weight, much sequence.
LONG = {"vocab_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 256}
SMOLLM2 = {
    "vocab_size": 49152,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "embed_dim": 576,
    "intermediate_dim": 1536,
    "max_seq_len": 8192,
    "rope_base": 100000,
    "scale_factor": 1,
}


def measure_shards() -> dict[str, float]:
    """Memory in MiB of a model's parameters and of its forward's peak, sharded over all ranks."""
    world_size = dist.get_world_size()
    few_BT = torch.ones(1, 8, dtype=torch.int64)
    with torch.no_grad():
        # Code and buffers of a process's first forward are not the model's.
        _sharded(_on_meta(**LONG, intermediate_dim=256, max_seq_len=64), world_size).scorer(few_BT, few_BT)
        before = _resident()
        decoder = _on_meta(**WIDE, intermediate_dim=1024, max_seq_len=64)
        sizes = [sum(p.nbytes for p in layer.parameters()) for layer in decoder.layers]
        model_bytes = sum(p.nbytes for p in decoder.parameters())
        model = _sharded(decoder, world_size)
        kept = _resident()
        _reset_peak()
        model.scorer(few_BT, few_BT)
    return {
        "model": model_bytes / MIB,
        "layer": sizes[0] / MIB,
        "kept": (kept - before) / MIB,
        "peak": (_peak() - before) / MIB,
    }


def measure_activations(num_tokens: int) -> float:
    """Peak MiB of a forward over one window, split over all ranks, above what weights and tables take."""
    world_size = dist.get_world_size()
    return_freed_memory()
    decoder = _on_meta(**LONG, intermediate_dim=768, max_seq_len=65536)
    weights = {name: p.shape for name, p in decoder.named_parameters()}
    dims = ParallelDims(1, 1, world_size, 1, world_size)
    model = split_model(decoder, dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=MAX_LOGITS_BYTES)
    model.load(_Made(weights))
    with torch.no_grad():
        # Buffers of the first calls, of the group too, are not the window's.
        few_BT = torch.ones(1, 64, dtype=torch.int64)
        model.scorer(few_BT, few_BT)
        tokens_BT = torch.arange(num_tokens)[None] % LONG["vocab_size"]
        before = _resident()
        _reset_peak()
        model.scorer(tokens_BT, tokens_BT)
    return (_peak() - before) / MIB


def measure_load(folder: str, dtype: torch.dtype) -> dict[str, float] | None:
    """Sum over ranks of the proportional set size, in MiB, before, during (its peak) and after loading."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    with torch.device("meta"):
        decoder = llama3_2(**SMOLLM2).to(dtype).eval()
    dims = ParallelDims(1, world_size, 1, 1, world_size)
    mesh = dims.build_mesh("cpu")
    state_dict = load_state_dict(
        {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": folder,
            "checkpoint_files": ["model.safetensors"],
            "model_type": "LLAMA3_2",
        }
    ).state_dict
    model = split_model(decoder, dims, mesh, CPU, max_logits_bytes=MAX_LOGITS_BYTES)
    dist.barrier()
    if rank:
        dist.barrier()
        model.load(state_dict)
        dist.barrier()
        dist.barrier()
        return None
    sampler = _Sampler(pids)
    before = sampler.sample()
    sampler.start()
    dist.barrier()
    model.load(state_dict)
    dist.barrier()
    peak = sampler.stop()
    after = sampler.sample()
    dist.barrier()
    found = {"before": before, "peak": peak, "after": after, "samples": sampler.num_samples}
    found["checkpoint"] = (Path(folder) / "model.safetensors").stat().st_size
    return {key: value if key == "samples" else value / MIB for key, value in found.items()}


class _Made(dict[str, torch.Tensor]):
    """Weights that are made when they are asked for, as a file's are mapped."""

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = super().__getitem__(name)
        return torch.full(shape, 1e-3)


class _Sampler(threading.Thread):
    """Adds up the proportional set sizes of processes, over and over."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.pids, self.peak, self.num_samples = pids, 0, 0
        self.done = threading.Event()

    def sample(self) -> int:
        return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in self.pids)

    def run(self) -> None:
        while not self.done.is_set():
            self.peak = max(self.peak, self.sample())
            self.num_samples += 1

    def stop(self) -> int:
        self.done.set()
        self.join()
        # Reading the sizes takes long; what is there at the end counts too.
        return max(self.peak, self.sample())


def _sharded(decoder: TransformerDecoder, world_size: int) -> SplitModel:
    weights = {name: p.shape for name, p in decoder.named_parameters()}
    dims = ParallelDims(1, world_size, 1, 1, world_size)
    model = split_model(decoder, dims, dims.build_mesh("cpu"), CPU, max_logits_bytes=MAX_LOGITS_BYTES)
    model.load(_Made(weights))
    return model


def _on_meta(**sizes: int) -> TransformerDecoder:
    with torch.device("meta"):
        return llama3_2(**sizes).eval()


def _resident() -> int:
    return _field("/proc/self/status", "VmRSS:")


def _peak() -> int:
    return _field("/proc/self/status", "VmHWM:")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} has no {name}")
