"""The real llama-perplexity beside the protocol ``llama_cpp``, on the same float32 weights.

    python benchmarks/llama_cpp.py --text FILE [--chunks 20] [--context 512] [--no-bos]

The first call builds llama.cpp in the cache folder, from the source package of llama-cpp-python (a quarter of
an hour on two cores; needs cmake and a C++ compiler), and writes the demo model as a float32 GGUF. Both sides
then score the same chunks: weights, keys and values in float32, no flash attention. Prints the mean NLL (nats
per token) after each chunk and the tool's +/- beside ours.
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
from typing import Any

import numpy as np

from ppl_eval.commands import demo_model
from ppl_eval.config.files import whole_folder
from ppl_eval.config.paths import home

SOURCE = "llama-cpp-python==0.3.36"
CHUNK_LINE = re.compile(r"^\s*\d+\s+[\d.]+\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)


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
            ":all:",
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


def write_gguf(path: Path, add_bos: bool) -> None:
    """Write the demo model as the recipe sees it (bfloat16 values) as a float32 GGUF."""
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
            writer.add_tensor(tensor.name, weight.bfloat16().float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def theirs(program: Path, model: Path, options: argparse.Namespace) -> tuple[list[float], float]:
    """Run llama-perplexity; return the mean NLL after each chunk, and the standard error of the last."""
    command = [program, "-m", model, "-f", options.text, "-c", options.context, "-b", options.context]
    command += [
        "--chunks",
        options.chunks,
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-fa",
        "off",
        "--ppl-output-type",
        "1",
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    found = [(float(mean), float(stderr)) for mean, stderr in CHUNK_LINE.findall(done.stdout)]
    assert found, done.stdout + done.stderr
    return [mean for mean, _ in found], found[-1][1]


def ours(folder: Path, options: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """Run the recipe on the same chunks; return the mean NLL after each, and the result."""
    import pyarrow.parquet as pq

    command = [sys.executable, "-m", "distributed_ppl_eval", "--config", "smollm2/135M_ppl", "dtype=fp32"]
    command += [
        "protocol=ppl_eval.protocols.llama_cpp",
        f"protocol.max_seq_len={options.context}",
        "per_window=true",
    ]
    command += [f"protocol.bos={'never' if options.no_bos else 'always'}", "dataset=ppl_eval.data.text_files"]
    command += [f"dataset.paths=[{options.text}]", f"max_windows={options.chunks}", f"output_dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    windows = pq.read_table(folder / "windows.parquet")
    nll, num_tokens = (windows[name].to_numpy() for name in ("nll_sum", "num_tokens"))
    return (np.cumsum(nll) / np.cumsum(num_tokens)).tolist(), json.loads((folder / "result.json").read_text())


def main() -> None:
    """Score with both and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--no-bos", action="store_true")
    options = parser.parse_args()
    options.text = options.text.resolve()
    program = build(home() / "llama.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.gguf"
        write_gguf(model, add_bos=not options.no_bos)
        means, stderr = theirs(program, model, options)
        own, result = ours(Path(scratch) / "run", options)
    for chunk, (their_mean, own_mean) in enumerate(zip(means, own, strict=True), start=1):
        print(f"after chunk {chunk:3d}: {their_mean:.6f} by llama-perplexity, {own_mean:.6f} here")
    worst = max(abs(a - b) for a, b in zip(means, own, strict=True))
    own_stderr = result["perplexity_stderr_llama_cpp"] / result["perplexity"]
    print(
        f"largest difference {worst:.1e} (the tool prints 6 decimals); +/- {stderr:.6f} and {own_stderr:.6f}"
    )


if __name__ == "__main__":
    main()
