"""Every protocol, with domains and positions: the same figures and the same records on 1, 2 and 3
processes."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from helpers.runs import many, result_of
from helpers.tiny import write_config

PROTOCOLS = {
    "disjoint": ["protocol.max_seq_len=40", "protocol.bos=each_window"],
    "strided": ["protocol.max_seq_len=48", "protocol.stride=20", "protocol.weighting=hf_doc"],
    "rolling": ["protocol.max_seq_len=32"],
    "llama_cpp": ["protocol.max_seq_len=33", "protocol.bos=always"],
    "megatron": ["protocol.max_seq_len=32", "protocol.overlap_stride=10"],
    "per_sample": ["protocol.max_seq_len=32", "protocol.too_long=window"],
}
FIGURES = {
    "disjoint": "perplexity",
    "strided": "perplexity_exact_weighting",
    "rolling": "word_perplexity",
    "llama_cpp": "perplexity_stderr_llama_cpp",
    "megatron": "adjusted_perplexity",
    "per_sample": "macro_perplexity",
}
# How a run was launched, and how long it took.
NOT_COMPARED = ("parallel", "timing", "run", "versions")


def compared(folder: Path) -> tuple[dict, list]:
    result = {name: value for name, value in result_of(folder).items() if name not in NOT_COMPARED}
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("windows", "documents")]
    return result, tables


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory) -> dict[tuple[str, int], tuple[dict, list]]:
    scratch = tmp_path_factory.mktemp("same_bits")
    lines = tiny.text.read_text(encoding="utf-8").split("\n")
    sources = {}
    for name, part in (("first", lines[:30]), ("second", lines[30:100])):
        (scratch / f"{name}.txt").write_text("\n".join(part), encoding="utf-8")
        sources[name] = {
            "_component_": "ppl_eval.data.text_files",
            "paths": str(scratch / f"{name}.txt"),
            "unit": "line",
        }
    dataset = {"_component_": "ppl_eval.data.domains", "sources": sources}
    config = write_config(
        scratch / "config.yaml",
        tiny.folder,
        tiny.text,
        dataset=dataset,
        batch_size=3,
        position_buckets=4,
        per_window=True,
        per_document=True,
    )
    env = {"PPL_EVAL_HOME": str(scratch / "home")}
    found = {}
    for num_processes in (1, 2, 3):
        argvs = [
            [
                "--config",
                str(config),
                f"protocol=ppl_eval.protocols.{name}",
                *overrides,
                f"output_dir={scratch / f'{name}{num_processes}'}",
            ]
            for name, overrides in PROTOCOLS.items()
        ]
        finished = many(num_processes, argvs, scratch, env)
        assert finished.code == 0, finished.output
        found.update(
            {(name, num_processes): compared(scratch / f"{name}{num_processes}") for name in PROTOCOLS}
        )
    return found


@pytest.mark.parametrize("name", PROTOCOLS)
def test_same_figures_and_records(runs, name: str) -> None:
    one, two, three = (runs[name, n] for n in (1, 2, 3))
    result, (windows, documents) = one
    assert json.dumps(result) == json.dumps(two[0]) == json.dumps(three[0])
    assert one[1] == two[1] == three[1]
    # And there is something to compare.
    assert result["protocol"]["name"] == name
    assert result[FIGURES[name]] > 0
    assert windows.num_rows == result["num_windows"] > 6
    assert sum(documents["num_windows"].to_pylist()) == result["num_windows"]
    assert set(result["domains"]) == {"first", "second"}
    domains = result["domains"].values()
    assert sum(part["num_tokens"] for part in domains) == result["num_tokens"]
    assert sum(bucket["num_tokens"] for bucket in result["positions"]) == result["num_tokens"]
    low, high = result["perplexity_interval_95"]
    assert low < result.get("perplexity_exact_weighting", result["perplexity"]) < high
