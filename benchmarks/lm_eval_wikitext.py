"""lm-evaluation-harness's own wikitext task beside the recipe, on the whole WikiText-2 test set in float32.

    python benchmarks/lm_eval_wikitext.py wiki.test.raw [--length 2048] [--pages N]

``wiki.test.raw`` is the raw test file, as Salesforce published it. lm-eval's evaluator, with its own task
(detokeniser, counts, metrics) and its own Hugging Face model, scores the demo model first, then the recipe
does, with ``softmax=torch`` and with the exact one. Both read the file's pages, from files of their own.
Prints every figure to the last digit and fails where word perplexities differ by more than 1e-6.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ppl_eval.commands.demo_model import fetch
from ppl_eval.data.lm_eval_tasks import wikitext_pages

FIGURES = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def theirs(model: Path, pages: list[str], length: int, scratch: Path) -> dict[str, float]:
    """Run ``lm_eval``'s evaluator on its task ``wikitext``, with these pages in place of the download."""
    os.environ["HF_DATASETS_CACHE"] = str(scratch / "datasets")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    file = scratch / "pages.jsonl"
    file.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages), encoding="utf-8")
    data = {"data_files": {split: str(file) for split in ("train", "validation", "test")}}
    # The task as lm-eval has it, but for where its documents come from.
    task = {"task": "wikitext", "dataset_path": "json", "dataset_name": None, "dataset_kwargs": data}
    manager = TaskManager()
    loaded = manager.load([{"group": "local", "task": [task]}])["tasks"]["wikitext"]
    # Where a tokenizer adds BOS itself, lm-eval 0.4.13 would put it there twice.
    harness = HFLM(
        pretrained=str(model),
        dtype="float32",
        max_length=length,
        batch_size=1,
        device="cpu",
        add_bos_token=False,
    )
    done = simple_evaluate(model=harness, tasks=[loaded], task_manager=manager, bootstrap_iters=0)
    assert done is not None
    return {name: done["results"]["wikitext"][f"{name},none"] for name in FIGURES}


def ours(pages: list[str], length: int, softmax: str, scratch: Path) -> dict[str, Any]:
    """Run the recipe; return its ``result.json``."""
    raw, out = scratch / "pages.raw", scratch / softmax
    raw.write_text("\n".join(pages), encoding="utf-8")
    command = [sys.executable, "-m", "distributed_ppl_eval", "--config", "smollm2/135M_ppl", "dtype=fp32"]
    command += ["dataset=ppl_eval.data.lm_eval_task", f"dataset.paths=[{raw}]", "max_windows=null"]
    command += ["protocol=ppl_eval.protocols.rolling", f"protocol.max_seq_len={length}", "batch_size=1"]
    subprocess.run([*command, f"softmax={softmax}", f"output_dir={out}"], check=True, capture_output=True)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def main() -> None:
    """Score with both and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path, help="wiki.test.raw")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pages", type=int, help="only the first N pages")
    options = parser.parse_args()
    pages = wikitext_pages(options.raw.read_text(encoding="utf-8"))[: options.pages]
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            f"here, softmax={softmax}": ours(pages, options.length, softmax, Path(scratch))
            for softmax in ("torch", "exact")
        }
        first = runs["here, softmax=torch"]
        print(*(f"{first[f'num_{unit}']:,} {unit}" for unit in ("documents", "words", "bytes")), sep=", ")
        print(f"{first['num_tokens']:,} tokens in {first['num_windows']:,} windows of {options.length}")
        for name, figures in runs.items():
            print(f"{name:20}", *(f"{figure} {figures[figure]!r}" for figure in FIGURES), flush=True)
        published = theirs(fetch("smollm2-135m"), pages, options.length, Path(scratch))
    print(f"{'lm-eval':20}", *(f"{figure} {published[figure]!r}" for figure in FIGURES))
    differences = {
        name: found["word_perplexity"] / published["word_perplexity"] - 1 for name, found in runs.items()
    }
    for name, difference in differences.items():
        print(f"{name}: word perplexity differs by {difference:+.1e} relative")
    if abs(differences["here, softmax=torch"]) > 1e-6:
        sys.exit("the word perplexities do not agree to 1e-6")


if __name__ == "__main__":
    main()
