"""Small tasks of each of lm-eval's kinds, from local files."""

import json
import random
from pathlib import Path

CONTEXT = "the quick brown fox, number {}, jumps over lazy dogs; naïve café 漢字 and then some more words "
_MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
    ],
}
_CLOZE = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{' ' + choices[label]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
_ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question * 4}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
}
_GENERATES = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[label]}}",
    "generation_kwargs": {"until": ["."]},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
KINDS = {"choose": _MULTIPLE_CHOICE, "cloze": _CLOZE, "rolling": _ROLLING, "generates": _GENERATES}


def write_tasks(folder: Path, num_documents: int = 13, repeat: int = 1) -> Path:
    """Write one task of each kind of ``KINDS`` over the same documents; returns the folder for include_path.

    Args:
        folder: where to write.
        num_documents: questions; 13 is divided by no number of ranks.
        repeat: length of a question.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["fox", "lazy dogs", "number nine", "brown", "a naïve café", "jumps over it", "漢字"]
    lines = []
    for number in range(num_documents):
        question = (CONTEXT.format(number) * (repeat + number % 2)).strip()
        row = {"question": question, "choices": draw.sample(words, 4), "label": draw.randrange(4)}
        lines.append(json.dumps(row))
    (folder / "data.jsonl").write_text("\n".join(lines))
    for name, kind in KINDS.items():
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
            "test_split": "test",
            **kind,
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task, ensure_ascii=False))
    return folder
