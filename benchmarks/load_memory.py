"""Memory that loading a checkpoint takes: peak of one process, and what several processes share.

    python benchmarks/load_memory.py ~/.cache/ppl_eval/models/smollm2-135m bf16

Linux only: reads /proc/self. Prints one JSON object per case.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torchtune.models.llama3_2 import llama3_2

from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def from_proc(file: str, *keys: str) -> list[int]:
    """Values in bytes of lines like `VmRSS:   1234 kB`."""
    lines = (line.split() for line in Path(f"/proc/self/{file}").read_text().splitlines())
    values = {
        line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3 and line[2] == "kB"
    }
    return [values[key] for key in keys]


def measure(build: Callable[[], nn.Module], section: dict, dtype: torch.dtype) -> dict[str, int]:
    """Loads, reads every weight once, and returns bytes: the model's, the largest tensor's, and the growth at
    the peak."""
    gc.collect()
    before = from_proc("status", "VmRSS")[0]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    with torch.device("meta"):
        model = build()
    load_into(model, load_state_dict(section).state_dict, dtype=dtype)
    for weight in model.parameters():
        weight.data.view(torch.uint8).max()
    peak, after = from_proc("status", "VmHWM", "VmRSS")
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return {
        "weight_bytes": sum(sizes),
        "largest_bytes": max(sizes),
        "peak_growth_bytes": peak - before,
        "resident_growth_bytes": after - before,
    }


def shared(build: Callable[[], nn.Module], section: dict, dtype: torch.dtype) -> None:
    """One of several processes: loads, touches everything, reports its memory when told, ends when told."""
    with torch.device("meta"):
        model = build()
    before = from_proc("smaps_rollup", "Rss", "Pss", "Anonymous")
    load_into(model, load_state_dict(section).state_dict, dtype=dtype)
    for weight in model.parameters():
        weight.data.view(torch.uint8).max()
    print("loaded", flush=True)
    sys.stdin.readline()
    after = from_proc("smaps_rollup", "Rss", "Pss", "Anonymous")
    names = ("rss_growth_bytes", "pss_growth_bytes", "anonymous_growth_bytes")
    print(
        json.dumps(dict(zip(names, (a - b for a, b in zip(after, before, strict=True)), strict=True))),
        flush=True,
    )
    sys.stdin.readline()


def of_processes(num_processes: int, arguments: list[str]) -> list[dict[str, int]]:
    """Runs `shared` in several processes at once and returns what each reports while all hold their model."""
    command = [sys.executable, __file__, *arguments, "--shared"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(num_processes)]  # type: ignore[call-overload]
    reports = []
    for process in processes:
        assert process.stdout.readline() == "loaded\n"
    for process in processes:
        process.stdin.write("report\n")
        process.stdin.flush()
        reports.append(json.loads(process.stdout.readline()))
    for process in processes:
        process.communicate("end\n")
    return reports


def build_from(config: dict) -> Callable[[], nn.Module]:
    """The builder of a llama with the sizes of a config.json."""
    return lambda: llama3_2(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        embed_dim=config["hidden_size"],
        max_seq_len=config.get("max_position_embeddings", 2048),
        intermediate_dim=config["intermediate_size"],
        rope_base=int(config.get("rope_theta", 500_000)),
        scale_factor=1,
    )


def main() -> None:
    """Measures the checkpoint of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--files", nargs="*")
    parser.add_argument("--form", default="HF", choices=["HF", "Meta", "TorchTune"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    build = build_from(json.loads((arguments.folder / "config.json").read_text()))
    section = {
        "_component_": f"torchtune.training.FullModel{arguments.form}Checkpointer",
        "checkpoint_dir": str(arguments.folder),
        "checkpoint_files": arguments.files,
        "model_type": "LLAMA3_2",
    }
    if arguments.shared:
        shared(build, section, DTYPES[arguments.dtype])
        return
    print(json.dumps(measure(build, section, DTYPES[arguments.dtype])))
    for report in of_processes(arguments.processes, sys.argv[1:]):
        print(json.dumps(report))


if __name__ == "__main__":
    main()
