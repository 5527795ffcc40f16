"""``reference``: two models on the same tokens, against transformers in float64, the same bits whoever
scores."""

import json
import math
import shutil

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch

from helpers import llama_kld
from helpers.runs import PPL_EVAL, many, result_of, run
from helpers.tiny import MODEL, SHAPE, write_config, write_model, write_tokenizer
from results.test_resume import ledger_of, start_held

# A student beside its teacher: other widths and depths, one vocabulary.
TEACHER = {"embed_dim": 96, "num_heads": 8, "num_kv_heads": 4, "num_layers": 3, "intermediate_dim": 192}
ITSELF = [f"reference.model.{name}={SHAPE[name]}" for name in TEACHER]
ITSELF.append("reference.checkpointer.checkpoint_dir=${checkpointer.checkpoint_dir}")
# Ranks and overrides of each run.
RUNS = {
    "one": (1, []),
    "two": (2, []),
    "three": (3, []),
    "sharded": (2, ["data_parallel_shard_dim=2"]),
    "split": (2, ["tensor_parallel_dim=2", "per_token=false"]),
    "sequence": (2, ["context_parallel_dim=2", "per_token=false"]),
    "itself": (1, ITSELF),
    "alone": (1, ["~reference"]),
}
NOT_COMPARED = ("parallel", "timing", "run", "notes", "plan")


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """Its folder and transformers' model."""
    folder = tmp_path_factory.mktemp("teacher")
    write_tokenizer(folder)
    return folder, write_model(folder, seed=1, **TEACHER)


@pytest.fixture(scope="module")
def config(tiny, teacher, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("reference")
    folder, _ = teacher
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
    }
    return write_config(
        scratch / "config.yaml",
        tiny.folder,
        tiny.text,
        reference={"model": {**MODEL, **TEACHER}, "checkpointer": checkpointer},
        protocol={"_component_": "ppl_eval.protocols.strided", "max_seq_len": 64, "stride": 48},
        batch_size=3,
        max_windows=31,
        position_buckets=2,
        per_token=True,
        per_window=True,
        report=True,
    )


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
    """Output folders by name."""
    scratch = config.parent
    env = {"PPL_EVAL_HOME": str(scratch / "home")}
    for ranks in (1, 2, 3):
        argvs = [
            ["--config", str(config), *overrides, f"output_dir={scratch / name}"]
            for name, (number, overrides) in RUNS.items()
            if number == ranks
        ]
        finished = many(ranks, argvs, scratch, env)
        assert finished.code == 0, finished.output
    return {name: scratch / name for name in RUNS}


def said(folder):
    return {name: value for name, value in result_of(folder).items() if name not in NOT_COMPARED}


def test_every_token_is_that_of_transformers_in_float64(runs, tiny, teacher):
    from tokenizers import Tokenizer

    stream = Tokenizer.from_file(str(tiny.folder / "tokenizer.json")).encode(
        tiny.text.read_text(encoding="utf-8"), add_special_tokens=False
    )
    found = pandas.read_parquet(runs["one"] / "tokens.parquet")
    models = [tiny.twin.double(), teacher[1].double()]
    rows = {"logits": [], "base": [], "targets": []}
    try:
        for window in pandas.read_parquet(runs["one"] / "windows.parquet").itertuples():
            tokens = torch.tensor([stream.ids[window.start : window.stop]])
            scored = range(window.score_start - window.start - 1, window.stop - window.start - 1)
            for name, model in zip(("logits", "base"), models, strict=True):
                with torch.no_grad():
                    rows[name].append(model(tokens).logits[0][list(scored)].numpy())
            rows["targets"].append(tokens[0, window.score_start - window.start :].numpy())
    finally:
        for model in models:
            model.float()
    logits_NV, base_NV, targets_N = (np.concatenate(values) for values in rows.values())
    # By llama-perplexity's definitions, nothing cut off.
    expected = llama_kld.statistics(llama_kld.log_probabilities(base_NV), logits_NV, targets_N, cut=-math.inf)
    reverse = llama_kld.statistics(llama_kld.log_probabilities(logits_NV), base_NV, targets_N, cut=-math.inf)
    base_N = llama_kld.log_probabilities(base_NV)[np.arange(len(targets_N)), targets_N]
    np.testing.assert_allclose(found.kl, expected["kld"], rtol=3e-5)
    np.testing.assert_allclose(found.reverse_kl, reverse["kld"], rtol=3e-5)
    np.testing.assert_allclose(found.reference_nll, -base_N, rtol=3e-5)
    top_N1 = base_NV.argmax(axis=1)[:, None]
    above_N = (logits_NV > np.take_along_axis(logits_NV, top_N1, axis=1)).sum(axis=1)
    assert found.top_rank.tolist() == (1 + above_N).tolist()

    figures = result_of(runs["one"])["comparison"]
    for ours, theirs in {
        "kl_mean": "kl_mean",
        "ce_loss_difference": "ln_ratio",
        "probability_change_mean": "change_mean",
        "probability_change_rms": "change_rms",
        "kl_stderr_of_independent_tokens": "kl_stderr",
    }.items():
        assert figures[ours] == pytest.approx(expected[theirs], rel=2e-5), ours
    assert figures["same_top"] == expected["same_top"]
    for percent, value in figures["kl_percentiles"].items():
        assert value == pytest.approx(np.percentile(found.kl.astype(np.float64), float(percent)), rel=1e-7)


def test_the_same_bits_for_any_number_of_ranks_and_under_fsdp(runs):
    files = [
        {part.name: part.read_bytes() for part in sorted((runs[name] / "tokens.parquet").iterdir())}
        for name in ("one", "two", "three", "sharded")
    ]
    for name, content in zip(("two", "three", "sharded"), files[1:], strict=True):
        assert said(runs[name]) == said(runs["one"]), name
        assert content == files[0], name


@pytest.mark.parametrize("name", ["split", "sequence"])
def test_split_models_agree_within_the_tolerance(runs, name):
    here, whole = result_of(runs[name])["comparison"], result_of(runs["one"])["comparison"]
    for figure in (
        "kl_mean",
        "reverse_kl_mean",
        "reference_ce_loss",
        "probability_change_rms",
        "top_rank_mean",
    ):
        assert here[figure] == pytest.approx(whole[figure], rel=1e-5), figure
    assert here["same_top"] == whole["same_top"]


def test_figures_of_parts_add_up(runs):
    result, tokens = result_of(runs["two"]), pandas.read_parquet(runs["two"] / "tokens.parquet")
    assert math.fsum(tokens.kl.astype(np.float64)).hex() == result["comparison"]["kl_sum_hex"]
    by_position = [part["comparison"]["kl_mean"] * part["num_tokens"] for part in result["positions"]]
    assert math.fsum(by_position) == pytest.approx(result["comparison"]["kl_sum"], rel=1e-12)


def test_a_reference_changes_no_bit_of_the_models_own_number(runs):
    alone = result_of(runs["alone"])
    assert "comparison" not in alone
    for name in ("one", "itself"):
        assert result_of(runs[name])["nll_sum_hex"] == alone["nll_sum_hex"]


def test_the_report_is_written_and_finished_runs_are_held_against_each_other(runs):
    page = (runs["three"] / "report.html").read_text(encoding="utf-8")
    assert "KL divergence" in page
    found = run(PPL_EVAL, "compare", str(runs["alone"]), str(runs["one"]), "--max-ppl-ratio", "1.01")
    assert found.code == 0, found.output


def test_a_model_is_no_way_from_itself(runs):
    found = result_of(runs["itself"])["comparison"]
    assert found["kl_sum_hex"] == found["ce_loss_difference"].hex() == "0x0.0p+0"
    assert (found["perplexity_ratio"], found["same_top"], found["probability_change_rms"]) == (1.0, 1.0, 0.0)
    assert set(found["kl_percentiles"].values()) == {0.0}


def test_a_killed_run_and_parts_come_to_the_same_bits(runs, config, tmp_path, monkeypatch):
    monkeypatch.setenv("PPL_EVAL_HOME", str(config.parent / "home"))
    for rank in start_held(config, tmp_path, 2, f"output_dir={tmp_path / 'out'}"):
        rank.kill()
    assert ledger_of(tmp_path / "out").is_dir()
    argv = ["--config", str(config), f"output_dir={tmp_path / 'out'}"]
    finished = many(1, [argv], tmp_path)
    assert finished.code == 0, finished.output
    assert result_of(tmp_path / "out")["plan"]["resumed_batches"] == 6
    own = ["--config", str(config), f"output_dir={tmp_path / 'parts'}", "report=false"]
    parts = [[*own, f"part={i}/2"] for i in (1, 2)]
    finished = many(1, parts, tmp_path)
    assert finished.code == 0, finished.output
    finished = run(PPL_EVAL, "merge", str(tmp_path / "parts"), "-o", str(tmp_path / "merged"))
    assert finished.code == 0, finished.output
    for folder in ("out", "merged"):
        assert said(tmp_path / folder)["comparison"] == said(runs["one"])["comparison"]
        tables = [pq.read_table(where / "tokens.parquet") for where in (tmp_path / folder, runs["one"])]
        assert tables[0] == tables[1]


def test_what_cannot_be_compared_is_refused(config, teacher, tiny, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(teacher[0], folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    first, second = list(content["model"]["vocab"])[:2]
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    cases = {
        "the tokenizers of model and reference differ in": [
            f"reference.checkpointer.checkpoint_dir={folder}"
        ],
        "unknown key 'reference.tokenizer'": ["reference.tokenizer=a.b"],
        "reference.model is None": ["~reference.model"],
        "reference: ": ["reference.checkpointer.checkpoint_dir=nowhere"],
        "reference.model._component_ is 'os.system'": ["reference.model._component_=os.system"],
    }
    for told, overrides in cases.items():
        finished = many(
            1, [["--config", str(config), *overrides, f"output_dir={tmp_path / 'out'}"]], tmp_path
        )
        assert finished.code != 0
        assert told in finished.output, finished.output
        assert "Traceback" not in finished.output
