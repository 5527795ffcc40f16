"""What safety costs: the hash of the weights while they load, and the ledger while windows are scored.

    python benchmarks/safety.py [--rounds 15] [--windows 16]

On the demo model. Loading is measured until all weights were read, with the file in the page cache and not
(``posix_fadvise``), each with the hash and without, in turns; the least of all rounds, which other programs
disturbed least. CPU time is that of all threads. The ledger is measured in a run of the recipe: the time in
``Ledger.append``, with its synchronisations, over the time of scoring. Prints one JSON object a line.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import torch
from torchtune.models.llama3_2 import llama3_2

import distributed_ppl_eval
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.commands.demo_model import fetch
from ppl_eval.results import ledger

PAGE_BYTES = 4096
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = {
    "vocab_size": 49152,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "embed_dim": 576,
    "max_seq_len": 8192,
    "intermediate_dim": 1536,
    "rope_base": 100000,
    "scale_factor": 1,
}


def load_seconds(folder: Path, dtype: torch.dtype, *, hashed: bool, cold: bool) -> tuple[float, float]:
    """Load the model, and read all of it once; return wall-clock and CPU seconds."""
    section = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
    }
    if cold:
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with torch.device("meta"):
        model = llama3_2(**SIZES)
    weights = WeightsHash() if hashed else None
    begin, cpu_begin = time.perf_counter(), time.process_time()
    load_into(model, load_state_dict(section).state_dict, dtype=dtype, weights=weights)
    for weight in model.parameters():
        weight.data.view(torch.uint8).reshape(-1)[::PAGE_BYTES].max()
    seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    if weights is not None:
        weights.close()
    return seconds


def measure_hash(folder: Path, rounds: int) -> None:
    """Print the cost of the hash in each case."""
    size = (folder / "model.safetensors").stat().st_size
    for dtype in DTYPES:
        for cold in (True, False):
            taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for turn in range(2 * rounds):
                hashed = bool(turn % 2)
                taken[hashed].append(load_seconds(folder, DTYPES[dtype], hashed=hashed, cold=cold))
            wall, cpu = map(min, zip(*taken[False], strict=True))
            wall_hashed, cpu_hashed = map(min, zip(*taken[True], strict=True))
            report = {
                "dtype": dtype,
                "from": "disk" if cold else "page cache",
                "load_seconds": round(wall, 3),
                "load_and_hash_seconds": round(wall_hashed, 3),
                "cost_percent": round(100 * (wall_hashed / wall - 1), 1),
                "load_cpu_seconds": round(cpu, 3),
                "hash_cpu_seconds": round(cpu_hashed - cpu, 3),
                "megabytes": size // 10**6,
            }
            print(json.dumps(report), flush=True)


def measure_ledger(windows: int) -> None:
    """Print the share of a run that its records take."""
    append, sync = ledger.Ledger.append, os.fdatasync
    spent = {"append": 0.0, "sync": 0.0, "batches": 0, "syncs": 0}
    appending = False

    def timed_append(self: ledger.Ledger, records: object) -> None:
        nonlocal appending
        begin, appending = time.perf_counter(), True
        append(self, records)
        spent["append"] += time.perf_counter() - begin
        spent["batches"] += 1
        appending = False

    def timed_sync(handle: int) -> None:
        begin = time.perf_counter()
        sync(handle)
        if appending:  # The last one, when the file is closed, is after scoring.
            spent["sync"] += time.perf_counter() - begin
            spent["syncs"] += 1

    ledger.Ledger.append, os.fdatasync = timed_append, timed_sync
    with tempfile.TemporaryDirectory(dir=".") as folder:
        keys = [f"max_windows={windows}", "batch_size=1", f"output_dir={folder}/out"]
        code = distributed_ppl_eval.run(["--config", "smollm2/135M_ppl", *keys])
        assert code == 0
        score_seconds = json.loads(Path(folder, "out", "result.json").read_text())["timing"]["score_seconds"]
    report = {
        "windows": windows,
        "score_seconds": round(score_seconds, 2),
        "append_microseconds_per_batch": round(1e6 * (spent["append"] - spent["sync"]) / spent["batches"], 1),
        "syncs": spent["syncs"],
        "sync_milliseconds": round(1e3 * spent["sync"] / max(1, spent["syncs"]), 2),
        "cost_percent": round(100 * spent["append"] / score_seconds, 3),
    }
    print(json.dumps(report), flush=True)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--windows", type=int, default=16)
    options = parser.parse_args()
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps({**machine, "threads": torch.get_num_threads(), "load_average": os.getloadavg()[0]}))
    measure_hash(fetch("smollm2-135m"), options.rounds)
    if options.windows:
        measure_ledger(options.windows)


if __name__ == "__main__":
    main()
