"""Throughput and peak memory of the recipe against a plain transformers loop, both as whole processes, in
turns.

    python benchmarks/throughput.py [--windows 16] [--length 1024] [--batch 1] [--rounds 5]

Same model (SmolLM2-135M, bfloat16), same windows, one process each with all cores. The loop keeps full
logits, takes their log-softmax in float32 and adds up in float64, as evaluation scripts do. Prints every
round, then medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOOP = """
import sys, torch
from pydoc_data.topics import topics
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, (windows, length, batch) = sys.argv[1], map(int, sys.argv[2:5])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
text = "\\n\\n".join(topics[name] for name in sorted(topics))
ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
nll_sum, num_tokens = 0.0, 0
with torch.no_grad():
    for begins in torch.arange(0, windows * length, length).split(batch):
        tokens = torch.tensor([ids[begin : begin + length] for begin in begins.tolist()])
        log_probs = torch.log_softmax(model(tokens).logits[:, :-1].float(), dim=-1)
        nll = -log_probs.gather(2, tokens[:, 1:, None])
        nll_sum += nll.double().sum().item()
        num_tokens += nll.numel()
print(nll_sum, num_tokens)
"""


def main() -> None:
    """Run both in turns and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from ppl_eval.commands.demo_model import fetch

    folder = fetch("smollm2-135m")
    with tempfile.TemporaryDirectory() as scratch:
        recipe = [
            sys.executable,
            "-m",
            "distributed_ppl_eval",
            "--config",
            "smollm2/135M_ppl",
            f"batch_size={options.batch}",
        ]
        recipe += [
            f"max_windows={options.windows}",
            f"protocol.max_seq_len={options.length}",
            f"output_dir={scratch}",
        ]
        loop = [sys.executable, "-c", LOOP, str(folder), str(options.windows)]
        loop += [str(options.length), str(options.batch)]
        rounds = []
        for number in range(options.rounds):
            ours, theirs = measure(recipe), measure(loop)
            rounds.append((ours, theirs))
            print(
                f"round {number + 1}: recipe {ours[0]:.1f} s, {ours[1] / 2**20:.0f} MiB; transformers loop"
                f" {theirs[0]:.1f} s, {theirs[1] / 2**20:.0f} MiB; ratio {theirs[0] / ours[0]:.2f}",
                flush=True,
            )
        result = json.loads((Path(scratch) / "result.json").read_text())
    tokens = options.windows * (options.length - 1)
    seconds = [statistics.median(round_[i][0] for round_ in rounds) for i in (0, 1)]
    peaks = [statistics.median(round_[i][1] for round_ in rounds) for i in (0, 1)]
    print(f"{tokens:,} tokens, {os.cpu_count()} cores, perplexity {result['perplexity']:.6f}")
    print(f"recipe:            {tokens / seconds[0]:7.0f} tokens/s, peak {peaks[0] / 2**20:.0f} MiB")
    print(f"transformers loop: {tokens / seconds[1]:7.0f} tokens/s, peak {peaks[1] / 2**20:.0f} MiB")
    print(
        f"median of ratios:  {statistics.median(theirs[0] / ours[0] for ours, theirs in rounds):.2f} times"
        " the loop's throughput"
    )


def measure(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of a command."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(said.decode())
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
