"""Loading copies nothing that it need not: peak resident memory, and pages shared between processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf

from helpers import tiny_checkpoints as tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model of about 170 MiB (bf16) as safetensors and as torchtune's file, in bf16 and fp32."""
    sys.path.insert(0, str(SCRIPT.parent))
    import load_memory

    weights = tiny.random_weights(load_memory.build_from(CONFIG))
    root = tmp_path_factory.mktemp("memory")
    for dtype in (torch.bfloat16, torch.float32):
        folder = root / str(dtype).removeprefix("torch.")
        folder.mkdir()
        cast = {k: v.to(dtype) for k, v in weights.items()}
        hf = tune_to_hf(cast, 12, 4, 768)
        save_file({k: v.contiguous() for k, v in hf.items()}, folder / "model.safetensors")
        torch.save(cast, folder / "model.pt")
        (folder / "config.json").write_text(json.dumps(CONFIG))
    return root


FORMS = {"safetensors": ["--form", "HF"], "torch": ["--form", "TorchTune", "--files", "model.pt"]}
MEASURE_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
import load_memory
for case in sys.argv[2:]:
    sys.argv = ["load_memory", *case.split(), "--processes", "0"]
    load_memory.main()
"""


def test_peak_of_one_process(folders):
    """At most 1.2 times the weights plus the largest tensor, converted or not."""
    cases = [
        f"{folders / stored} bf16 {' '.join(form)}"
        for form in FORMS.values()
        for stored in ("bfloat16", "float32")
    ]
    command = [sys.executable, "-c", MEASURE_ALL, str(SCRIPT.parent), *cases]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(cases)
    for case, line in zip(cases, lines, strict=True):
        found = json.loads(line)
        # That pages are counted at all; a machine short of memory takes some of them back at once.
        assert found["resident_growth_bytes"] > 0.5 * found["weight_bytes"], (case, found)
        assert found["peak_growth_bytes"] <= 1.2 * found["weight_bytes"] + found["largest_bytes"], (
            case,
            found,
        )


@pytest.mark.parametrize("form", ["safetensors", pytest.param("torch", marks=pytest.mark.slow)])
def test_two_processes_share_what_needs_no_conversion(folders, form):
    command = [
        sys.executable,
        str(SCRIPT),
        str(folders / "bfloat16"),
        "bf16",
        *FORMS[form],
        "--processes",
        "2",
    ]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    alone, *ranks = map(json.loads, lines)
    assert len(ranks) == 2
    # Copied are only q and k (their rows change order between Hugging Face's form and torchtune's).
    copied = 0.12 if form == "safetensors" else 0.0
    for rank in ranks:
        assert rank["rss_growth_bytes"] >= 0.95 * alone["weight_bytes"]
        assert rank["anonymous_growth_bytes"] <= copied * alone["weight_bytes"] + 24 * MIB, rank
        assert rank["pss_growth_bytes"] <= (0.5 + copied) * alone["weight_bytes"] + 24 * MIB, rank
