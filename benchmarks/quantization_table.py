"""The table of docs/quantization.md: the demo model under every quantiser, on one text, with the command of
each row.

    OMP_NUM_THREADS=1 python benchmarks/quantization_table.py --windows 16

Runs the recipe once a row, each in a process of its own, on one thread. Speed is in tokens per second of
processor time, so that other work on the machine does not show.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

CONFIG = "smollm2/135M_ppl"
TORCHTUNE = "torchtune.training.quantization"
ROWS: dict[str, list[str]] = {
    "bf16": [],
    "int8 weight-only": ["quantizer._component_=torchao.quantization.Int8WeightOnlyConfig"],
    "int8 dynamic, int8 weight": [
        "quantizer._component_=torchao.quantization.Int8DynamicActivationInt8WeightConfig"
    ],
    "float8 weight-only": ["quantizer._component_=torchao.quantization.Float8WeightOnlyConfig"],
    **{
        f"int8 dynamic, int4 weight, {g}": [
            f"quantizer._component_={TORCHTUNE}.Int8DynActInt4WeightQuantizer",
            f"quantizer.groupsize={g}",
        ]
        for g in (32, 64)
    },
    **{
        f"int4, {g}": [
            f"quantizer._component_={TORCHTUNE}.Int4WeightOnlyQuantizer",
            f"quantizer.groupsize={g}",
        ]
        for g in (32, 64, 128, 256)
    },
    "int4, 64, HQQ": [
        "quantizer._component_=torchao.quantization.Int4WeightOnlyConfig",
        "quantizer.group_size=64",
        "quantizer.use_hqq=true",
    ],
    "int4, 64, AWQ": [
        "quantizer._component_=ppl_eval.quantization.awq",
        "quantizer.groupsize=64",
        "quantizer.calibration.num_windows=1",
        "quantizer.calibration.dataset._component_=ppl_eval.data.text_files",
        "quantizer.calibration.dataset.paths=[{calibration_text}]",
    ],
}


def run_row(argv: list[str]) -> None:
    """In a process of its own: the recipe, with the processor time of scoring printed at the end."""
    import distributed_ppl_eval as recipe

    evaluate = recipe.DistributedPPLEvalRecipe.evaluate

    def timed(self: recipe.DistributedPPLEvalRecipe) -> None:
        begin = time.process_time()
        evaluate(self)
        print(f"scoring took {time.process_time() - begin} s of processor time", flush=True)

    recipe.DistributedPPLEvalRecipe.evaluate = timed  # type: ignore[method-assign]
    sys.exit(recipe.run(argv))


def main() -> None:
    """Runs every row and prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("runs/quantization"))
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    arguments = parser.parse_args()
    print("| weights | layers | MiB | perplexity | ratio to bf16 | difference, nats/token | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    full = arguments.output / "bf16"
    for name in arguments.rows:
        folder = arguments.output / name.replace(", ", "_").replace(" ", "-")
        argv = [
            "--config",
            CONFIG,
            f"max_windows={arguments.windows}",
            "per_window=true",
            f"output_dir={folder}",
        ]
        argv += [a.format(calibration_text=argparse.__file__) for a in ROWS[name]]
        argv += [f"baseline={full}/result.json"] if name != "bf16" else []
        command = [sys.executable, __file__, "--row", *argv]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout}")
        seconds = float(done.stdout.split("scoring took ")[1].split()[0])
        print(line(name, json.loads((folder / "result.json").read_text()), seconds), flush=True)


def line(name: str, result: dict, seconds: float) -> str:
    """One row of the table."""
    quantizer, against = result["quantizer"], result.get("against_baseline")
    # bf16: two bytes a parameter
    num_bytes = quantizer["weight_bytes"] if quantizer else 2 * result["model"]["num_parameters"]
    ratio, difference = "1", "0"
    if against:
        ratio = f"{against['perplexity_ratio']:.4f} ± {against['perplexity_ratio_stderr']:.4f}"
        difference = f"{against['ce_loss_difference']:+.4f} ± {against['ce_loss_difference_stderr']:.4f}"
    layers = f"{quantizer['num_quantized']} of 210" if quantizer else "none"
    return (
        f"| {name} | {layers} | {num_bytes / 2**20:.1f} | {result['perplexity']:.3f} | {ratio} | {difference}"
        f" | {result['num_tokens'] / seconds:.0f} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        run_row(sys.argv[2:])
    main()
