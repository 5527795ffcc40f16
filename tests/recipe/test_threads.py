"""torchrun gives each rank one thread where a single process takes all cores: no bit may depend on it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ppl_eval  # sets MKL's reproducible mode, which is read at its first call
import torch
from helpers.tiny import SHAPE
from torchtune.models.llama3_2 import llama3_2
from ppl_eval.scoring.load import prepare_for_device

torch.manual_seed(0)
model = llama3_2(**SHAPE).eval().requires_grad_(False)
for parameter in model.parameters():
    parameter.normal_(0, 0.3)
prepare_for_device(model, torch.device("cpu"), compiled=False)
differing = []
for rows in range(1, 5):
    for length in (*range(1, 14), 31, 64, 100):
        tokens = torch.randint(0, SHAPE["vocab_size"], (rows, length))
        logits = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            logits.append(model(tokens))
        if not all(torch.equal(logits[0], other) for other in logits[1:]):
            differing.append((rows, length))
print(differing)
"""


def test_the_number_of_threads_changes_no_bit():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
