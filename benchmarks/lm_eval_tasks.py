"""Multiple choice: CPU time of `ppl-eval tasks`' model and of lm-eval's Hugging Face model, in turns.

    python benchmarks/lm_eval_tasks.py [--documents 12] [--rounds 2]

Both answer the same 4-choice questions with the demo model in float32 through lm-eval's own evaluator. CPU
time, since other work on the machine does not count in it; both on one thread.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppl_eval  # noqa: F401 - before anything is computed
from ppl_eval.commands.demo_model import model_folder
from ppl_eval.commands.run import config_of
from ppl_eval.config.settings import read_config
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring.load import Placement
from ppl_eval.tasks import evaluation
from ppl_eval.tasks.model import TaskModel


def write_task(folder: Path, num_documents: int) -> None:
    """Write questions of 100 words of Python's manual, and four ways to go on, one of them the real one."""
    draw = random.Random(0)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    rows = []
    for number in range(num_documents):
        begin = 400 * number
        real = " ".join(words[begin + 100 : begin + 104])
        others = [" ".join(words[i : i + 4]) for i in draw.sample(range(len(words) - 4), 3)]
        rows.append(
            {"question": " ".join(words[begin : begin + 100]), "choices": [real, *others], "label": 0}
        )
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "continue",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "continue.yaml").write_text(json.dumps(task))


def main() -> None:
    """Print CPU seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = model_folder("smollm2-135m")
    given = config_of(model, ["unused.txt"]) | {"output_dir": "unused", **evaluation._UNUSED}
    settings = read_config(OmegaConf.create(given), [])
    placement = Placement(torch.device("cpu"), torch.float32, ParallelDims(1, 1, 1, 1, 1), None)
    encoder, built, _ = evaluation._load_model(settings, placement)
    ours = TaskModel(built.scorer, encoder, max_length=2048, batch_size=4)
    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(model),
        batch_size=4,
        max_length=2048,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), arguments.documents)
        manager = TaskManager(include_path=folder, include_defaults=False)
        seconds: dict[str, list[float]] = {"ours": [], "lm-eval": []}
        for _ in range(arguments.rounds):
            for name, lm in (("ours", ours), ("lm-eval", theirs)):
                begin = time.process_time()
                found = simple_evaluate(lm, tasks=["continue"], task_manager=manager, log_samples=False)
                seconds[name].append(time.process_time() - begin)
                result = {k: v for k, v in found["results"]["continue"].items() if k.startswith("acc")}
                print(f"{name}: {seconds[name][-1]:.2f} s of CPU, {result}")
    ratio = min(seconds["lm-eval"]) / min(seconds["ours"])
    print(f"lm-eval's Hugging Face model takes {ratio:.2f} times the CPU time")


if __name__ == "__main__":
    main()
