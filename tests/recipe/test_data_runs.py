"""The recipe on every form of data: the same bits from every form, and on 1, 2 and 3 processes."""

import gzip
import json
from pathlib import Path
from typing import Any

from conftest import TinyModel
from helpers.runs import many, result_of
from helpers.tiny import write_config

SAMPLES = [
    {"tokens": [0, 60, 70, 80, 90, 100], "labels": [-100, -100, 70, 80, -100, 100]},
    {"tokens": [0, 61, 71], "labels": [-100, -100, -100]},
    {"tokens": [0, 62, 72, 82, 92, 102, 112, 122], "labels": [-100, 62, 72, 82, 92, 102, 112, 122]},
    {"tokens": [0, 63, 73, 83], "labels": [-100, 63, 73, 83]},
]


def sections(folder: Path, documents: list[str]) -> dict[str, dict[str, Any]]:
    """A ``dataset`` section for each form of the same documents."""
    import datasets

    table = datasets.Dataset.from_dict({"text": documents})
    table.to_parquet(str(folder / "corpus.parquet"))
    table.save_to_disk(str(folder / "saved"))
    (folder / "plain").mkdir()
    for i, text in enumerate(documents):
        (folder / "plain" / f"{i:04}.txt").write_bytes(text.encode())
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table.to_csv(str(folder / "corpus.csv"))
    files = {
        "plain": "plain/*.txt",
        "jsonl": "corpus.jsonl.gz",
        "csv": "corpus.csv",
        "parquet": "corpus.parquet",
    }
    made: dict[str, dict[str, Any]] = {
        name: {"_component_": "ppl_eval.data.text_files", "paths": [str(folder / path)]}
        for name, path in files.items()
    }
    made["saved"] = {"_component_": "ppl_eval.data.hub_text", "name": str(folder / "saved")}
    return made


def test_all_forms_and_all_numbers_of_processes_give_the_same_bits(tiny: TinyModel, tmp_path: Path) -> None:
    paragraphs = tiny.text.read_text().split("\n")
    documents = ["\n".join(paragraphs[i : i + 9]) for i in range(0, len(paragraphs), 9)]
    forms = sections(tmp_path, documents)
    forms["domains"] = {
        "_component_": "ppl_eval.data.domains",
        "sources": {"left": forms["plain"], "right": forms["jsonl"]},
    }
    forms["sft"] = {
        "_component_": "ppl_eval.data.sft",
        "dataset": {"_component_": "helpers.own_components.list_dataset", "samples": SAMPLES},
    }
    forms["own"] = {"_component_": "helpers.own_components.Countdown", "sizes": [40, 99], "remark": "counted"}
    env = {"PPL_EVAL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[1])}
    # As on one of two nodes that were started without a rendezvous.
    env["SLURM_NNODES"] = "2"
    jobs: dict[int, list[str]] = {1: list(forms), 2: ["jsonl", "domains", "sft", "own"], 3: ["saved", "sft"]}
    for num_processes, names in jobs.items():
        argvs = []
        for name in names:
            keys: dict[str, Any] = {
                "dataset": forms[name],
                "output_dir": str(tmp_path / f"{name}{num_processes}"),
            }
            if name == "sft":
                keys["protocol"] = {"_component_": "ppl_eval.protocols.per_sample", "max_seq_len": 64}
            config = write_config(tmp_path / f"{name}{num_processes}.yaml", tiny.folder, tiny.text, **keys)
            argvs.append(["--config", str(config), "allow_components=helpers"])
        done = many(num_processes, argvs, tmp_path, env)
        assert done.code == 0, done.output
        assert "note: the launcher started 2 nodes (SLURM_NNODES), but this run has 1" in done.output
    results = {(name, n): result_of(tmp_path / f"{name}{n}") for n, names in jobs.items() for name in names}
    for result in results.values():
        assert len([note for note in result["notes"] if "started 2 nodes" in note]) == 1
    text = [result for (name, _), result in results.items() if name not in ("sft", "domains", "own")]
    assert len({result["nll_sum_hex"] for result in text}) == 1
    assert len({json.dumps(result["dataset"]["fingerprint"]) for result in text}) == 1
    assert text[0]["num_documents"] == len(documents)
    twice = [results["domains", n] for n in (1, 2)]
    assert twice[0]["nll_sum_hex"] == twice[1]["nll_sum_hex"]
    # Both domains are the same text, and joined apart: each is the whole of the run without domains.
    for part in ("left", "right"):
        assert twice[0]["domains"][part]["nll_sum"] == text[0]["nll_sum"]
    own = [results["own", n] for n in (1, 2)]
    assert own[0]["nll_sum_hex"] == own[1]["nll_sum_hex"]
    assert own[0]["num_documents"] == 2
    assert own[0]["dataset"]["name"] == "countdown"
    assert "counted" in own[0]["notes"]
    samples = [result for (name, _), result in results.items() if name == "sft"]
    assert len({result["nll_sum_hex"] for result in samples}) == 1
    assert [result["num_tokens"] for result in samples] == [3 + 7 + 3] * 3
    assert samples[0]["bits_per_byte"] is None
    assert any("1 samples have no token to score" in note for note in samples[0]["notes"])
