"""The real llama-perplexity beside the protocol ``llama_cpp``, on the same float32 weights.

    python benchmarks/llama_cpp.py [--text FILE] [--chunks 4] [--context 128 512 1024]
    python benchmarks/llama_cpp.py --kl-divergence [--text FILE] [--chunks 4] [--context 512]

The first call builds llama.cpp in the cache folder, from the source package of llama-cpp-python (a quarter of
an hour on two cores; needs cmake and a C++ compiler), and writes the demo model as a float32 GGUF. Both sides
then score the same chunks: weights, keys and values in float32, no flash attention; each context with BOS and
without. Without a file, the text is the Python language reference with chat markup between its topics and a
line feed at its end. Prints the mean NLL (nats per token) and its +/- after each chunk, and fails where they
differ by more than 2e-6.

With ``--kl-divergence``, prints what the tool says of the demo model against its own Q4_0 rounding, both as
float32 GGUFs (with quantised weights the tool rounds activations as well), beside what the recipe says of the
two files with a ``reference``. The tool keeps the base's log-probabilities in 16 bits, cut 16 nats below the
largest and not renormalised, so the two are not equal to the last digit.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from ppl_eval.commands import demo_model
from ppl_eval.config.files import whole_folder
from ppl_eval.config.paths import home
from ppl_eval.config.yaml_files import find_config

SOURCE = "llama-cpp-python==0.3.36"
STATISTIC = re.compile(r"^([^:\n]*[^:\s])\s*:\s+(-?[\d.]+)", re.MULTILINE)
CHUNK_LINE = re.compile(r"^\s*\d+\s+[\d.]+\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)
# What arithmetic in another order may do to a mean; the tool prints six decimals.
TOLERANCE = 2e-6


def build(cache: Path) -> Path:
    """Build llama-perplexity, unless it is there."""
    folder = cache / SOURCE.replace("==", "-")
    program = folder / "build" / "bin" / "llama-perplexity"
    if program.is_file():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as half, tempfile.TemporaryDirectory(dir=cache) as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            SOURCE.partition("==")[0],
            "--dest",
            scratch,
        ]
        subprocess.run([*pip, SOURCE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (source,) = Path(scratch).glob("*/vendor/llama.cpp")
        # Static, so that the program may be moved away from its build tree.
        options = [
            "-DGGML_NATIVE=ON",
            "-DLLAMA_CURL=OFF",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        tree = Path(scratch) / "build"
        subprocess.run(["cmake", "-S", source, "-B", tree, *options], check=True)
        subprocess.run(["cmake", "--build", tree, "--target", "llama-perplexity", "--parallel"], check=True)
        (half / "build" / "bin").mkdir(parents=True)
        shutil.copy2(tree / "bin" / "llama-perplexity", half / "build" / "bin")
    return program


def write_gguf(path: Path, *, add_bos: bool, rounded: bool = False) -> None:
    """Write the demo model as the recipe sees it (bfloat16 values) as a float32 GGUF.

    Args:
        path: the file to write.
        add_bos: what the file says about BOS.
        rounded: whether its matrices went through Q4_0.
    """
    import gguf
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        reader = gguf.GGUFReader(str(demo_model.fetch_gguf(Path(scratch) / "model.gguf")))
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            if name != "tokenizer.ggml.add_bos_token":
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        writer.add_add_bos_token(add_bos)
        for tensor in reader.tensors:
            weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            values = weight.bfloat16().float().numpy()
            if rounded and values.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q4_0
                values = gguf.dequantize(gguf.quantize(values, kind), kind)
            writer.add_tensor(tensor.name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def run_tool(program: Path, model: Path, text: Path, context: int, chunks: int, *more: object) -> str:
    """Run llama-perplexity in float32; return what it printed."""
    options = ["-m", model, "-f", text, "-c", context, "-b", context, "--chunks", chunks]
    exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--ppl-output-type", "1"]
    command = [str(part) for part in (program, *options, *exact, *more)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def ours(folder: Path, text: Path, context: int, chunks: int, bos: str) -> tuple[Any, dict[str, Any]]:
    """Run the recipe on the same chunks; return mean NLL and its +/- after each, ``(chunks, 2)``, and the
    result."""
    import pyarrow.parquet as pq

    command = [sys.executable, "-m", "distributed_ppl_eval", "--config", "smollm2/135M_ppl", "dtype=fp32"]
    command += ["protocol=ppl_eval.protocols.llama_cpp", f"protocol.max_seq_len={context}", "batch_size=1"]
    command += [f"protocol.bos={bos}", "dataset=ppl_eval.data.text_files", f"dataset.paths=[{text}]"]
    command += [f"max_windows={chunks}", f"output_dir={folder}", "per_window=true"]
    subprocess.run(command, check=True, capture_output=True)
    windows = pq.read_table(folder / "windows.parquet")
    sums = (np.cumsum(windows[name].to_numpy()) for name in ("num_tokens", "nll_sum", "nll_sq_sum"))
    num_tokens, nll_sum, nll_sq_sum = sums
    mean = nll_sum / num_tokens
    stderr = np.sqrt((nll_sq_sum / num_tokens - mean**2) / (num_tokens - 1))
    return np.stack([mean, stderr], axis=1), json.loads((folder / "result.json").read_text())


def compare_nll(program: Path, text: Path, contexts: list[int], chunks: int) -> None:
    """Score with both, for each context with BOS and without, and print the comparison."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for bos in ("always", "never"):
            model = Path(scratch) / f"{bos}.gguf"
            write_gguf(model, add_bos=bos == "always")
            for context in contexts:
                lines = CHUNK_LINE.findall(run_tool(program, model, text, context, chunks))
                theirs = np.array(lines, dtype=np.float64)
                own, result = ours(Path(scratch) / f"{bos}-{context}", text, context, chunks, bos)
                assert theirs.shape == own.shape, f"{len(theirs)} chunks by llama-perplexity, {len(own)} here"
                print(f"context {context}, BOS {bos}, {result['num_tokens']:,} tokens")
                for chunk, (a, b) in enumerate(zip(theirs.tolist(), own.tolist(), strict=True), start=1):
                    print(
                        f"  {chunk} chunks: {a[0]:.6f} +/- {a[1]:.6f} by llama-perplexity,"
                        f" {b[0]:.6f} +/- {b[1]:.6f} here",
                        flush=True,
                    )
                worst = max(worst, np.abs(theirs - own).max())
    print(f"largest difference {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit(f"more than {TOLERANCE:.0e}")


def print_divergence(program: Path, text: Path, context: int, chunks: int) -> None:
    """Print the tool's comparison of the demo model with its Q4_0 rounding."""
    with tempfile.TemporaryDirectory() as scratch:
        base, rounded, logits = (Path(scratch) / name for name in ("base.gguf", "q4_0.gguf", "logits.bin"))
        write_gguf(base, add_bos=False)
        write_gguf(rounded, add_bos=False, rounded=True)
        save = ("--kl-divergence-base", logits)
        run_tool(program, base, text, context, chunks, *save)
        printed = run_tool(program, rounded, text, context, chunks, *save, "--kl-divergence")
        found = our_comparison(Path(scratch), rounded, base, text, context, chunks)
    theirs = {name.strip(): float(value) for name, value in STATISTIC.findall(printed)}
    percentiles = found["kl_percentiles"]
    own = {
        "Mean PPL(base)": found["reference_perplexity"],
        "Mean ln(PPL(Q)/PPL(base))": found["ce_loss_difference"],
        "Mean    KLD": found["kl_mean"],
        "Maximum KLD": percentiles["100"],
        "99.9%   KLD": percentiles["99.9"],
        "99.0%   KLD": percentiles["99"],
        "95.0%   KLD": percentiles["95"],
        "90.0%   KLD": percentiles["90"],
        "Median  KLD": percentiles["50"],
        "Mean    Δp": 100 * found["probability_change_mean"],
        "RMS Δp": 100 * found["probability_change_rms"],
        "Same top p": 100 * found["same_top"],
    }
    for name, value in own.items():
        print(f"{name:<28} {theirs[name]:12.6f} by llama-perplexity {value:12.6f} here")


def our_comparison(
    scratch: Path, model: Path, reference: Path, text: Path, context: int, chunks: int
) -> dict[str, Any]:
    """Run the recipe on both files; return ``comparison`` of its result."""
    config = OmegaConf.load(find_config("smollm2/135M_ppl"))
    folder = demo_model.model_folder("smollm2-135m")
    for name in ("tokenizer_json_path", "tokenizer_config_json_path"):
        config.tokenizer[name] = str(folder / Path(config.tokenizer[name]).name)
    config.checkpointer.checkpoint_dir = str(scratch)
    config.checkpointer.checkpoint_files = [model.name]
    config.reference = {
        "model": config.model,
        "checkpointer": {**config.checkpointer, "checkpoint_files": [reference.name]},
    }
    config.dataset = {"_component_": "ppl_eval.data.text_files", "paths": [str(text)]}
    config.protocol = {"_component_": "ppl_eval.protocols.llama_cpp", "max_seq_len": context, "bos": "never"}
    config |= {"dtype": "fp32", "max_windows": chunks, "output_dir": str(scratch / "out"), "batch_size": 1}
    OmegaConf.save(config, scratch / "config.yaml")
    command = [sys.executable, "-m", "distributed_ppl_eval", "--config", str(scratch / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = json.loads((scratch / "out" / "result.json").read_text())["comparison"]
    assert isinstance(found, dict)
    return found


def main() -> None:
    """Build the tool, then do what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--context", type=int, nargs="+")
    parser.add_argument("--kl-divergence", action="store_true")
    options = parser.parse_args()
    program = build(home() / "llama.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        if options.text is None:
            turns = (f"<|im_start|>user\n{name}<|im_end|>\n{topics[name]}" for name in sorted(topics))
            text.write_text("".join(turns).rstrip("\n") + "\n", encoding="utf-8")
        else:
            text = options.text.resolve()
        if options.kl_divergence:
            print_divergence(program, text, (options.context or [512])[0], options.chunks)
        else:
            compare_nll(program, text, options.context or [128, 512, 1024], options.chunks)


if __name__ == "__main__":
    main()
