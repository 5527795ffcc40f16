"""Prints the memory tables of docs/parallelism.md: `python benchmarks/parallel_memory.py`.

Takes some minutes. Needs the demo model (`make model`).
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from helpers.memory import measure_activations, measure_load, measure_shards
from helpers.processes import on_ranks
from ppl_eval.commands.demo_model import fetch


def main() -> None:
    """Measure and print, part by part."""
    print("sharding: MiB of the model, of one layer, kept by a rank, and at its forward's peak")
    for world_size in (1, 2, 4):
        found = on_ranks(measure_shards, world_size)[0]
        print(f"  {world_size} ranks  " + "  ".join(f"{key} {value:.0f}" for key, value in found.items()))

    print("context parallel: MiB of activations of one window, on the rank with the most")
    for num_tokens in (8192, 16384, 32768):
        peaks = [max(on_ranks(measure_activations, cp, num_tokens)) for cp in (1, 2, 4)]
        shown = "  ".join(f"cp {cp} {peak:.0f}" for cp, peak in zip((1, 2, 4), peaks, strict=True))
        print(f"  {num_tokens} tokens  {shown}")

    print("loading on 4 FSDP ranks: sum of proportional set sizes in MiB")
    folder = str(fetch("smollm2-135m"))
    for dtype in (torch.bfloat16, torch.float32):
        found = on_ranks(measure_load, 4, folder, dtype)[0]
        grown = found["peak"] - found["before"]
        print(
            f"  {dtype}  before {found['before']:.0f}  peak {found['peak']:.0f}  after {found['after']:.0f}"
            f"  checkpoint {found['checkpoint']:.0f}  growth / checkpoint {grown / found['checkpoint']:.2f}"
        )


if __name__ == "__main__":
    main()
