"""`nan: exclude`: windows whose NLL is not finite leave every sum, are named wherever the number is, and the
rest has the bits that it has without them."""

import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from helpers import nan_model
from helpers.runs import PPL_EVAL, many, ranks, result_of, run
from helpers.tiny import TEXT, write_config
from ppl_eval.commands import doctor_diff
from ppl_eval.metrics.window_records import record_dtype
from ppl_eval.results.ledger import read_ledger
from results.test_resume import everything, ledger_of, start_held

NUM_BUCKETS = 3
# 37 windows in two domains; a document is a window or two.
KEYS = {
    "max_windows": 37,
    "batch_size": 2,
    "per_window": True,
    "per_document": True,
    "per_token": True,
    "position_buckets": NUM_BUCKETS,
    "aggregation": {"precision": "float32"},
    "protocol": {"_component_": "ppl_eval.protocols.rolling", "max_seq_len": 16},
    "model": nan_model.MODEL,
}
BROKEN_LINES = (1, 4, 16)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the whole model, and runs of the broken one on 1 to 3 ranks, resumed and in parts."""
    folder = tmp_path_factory.mktemp("nan")
    nan_model.write_models(folder / "whole", folder / "broken")
    lines = [
        line[:20] + nan_model.BROKEN + line[20:] if index in BROKEN_LINES else line
        for index, line in enumerate(TEXT.splitlines()[:40])
    ]
    rows = [{"text": line, "domain": "a" if index < 9 else "b"} for index, line in enumerate(lines)]
    text = folder / "text.jsonl"
    text.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dataset = {"_component_": "ppl_eval.data.text_files", "paths": [str(text)], "domain_column": "domain"}
    configs = {
        name: write_config(folder / f"{name}.yaml", folder / name, text, **KEYS, dataset=dataset)
        for name in ("whole", "broken")
    }
    env = {"PPL_EVAL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    whole = ["--config", str(configs["whole"]), f"output_dir={folder / 'clean'}"]
    exclude = ["--config", str(configs["broken"]), "nan=exclude"]
    parts = [[*exclude, f"output_dir={folder / 'parts'}", f"part={i}/3"] for i in (1, 2, 3)]
    baseline = f"baseline={folder / 'clean' / 'result.json'}"
    alone = many(1, [whole, [*exclude, f"output_dir={folder / '1'}", baseline], *parts], folder, env)
    assert alone.code == 0, alone.output
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        held = start_held(configs["broken"], folder, 2, "nan=exclude", f"output_dir={folder / '2'}")
        for rank in held:
            rank.kill()
        shutil.copytree(folder / "2", folder / "held")
        merged = run(PPL_EVAL, "merge", str(folder / "parts"), "-o", str(folder / "merged"))
    assert merged.code == 0, merged.output
    for number in (2, 3):
        finished = many(number, [[*exclude, f"output_dir={folder / str(number)}"]], folder, env)
        assert finished.code == 0, finished.output
    return folder, alone.output, merged.output, env


@pytest.fixture(scope="module")
def excluded(runs):
    """Ids of the windows that must be left out: those that saw the token, by their text alone."""
    windows = pq.read_table(runs[0] / "clean" / "windows.parquet").to_pylist()
    tokens = pq.read_table(runs[0] / "clean" / "tokens.parquet").to_pylist()
    text = {(token["document"], token["position"]): token["text"] for token in tokens}
    found = [
        window["window_id"]
        for window in windows
        # The last token of a window is a target and no input.
        if nan_model.BROKEN
        in [text[window["document"], at] for at in range(window["start"], window["stop"] - 1)]
    ]
    assert 3 <= len(found) < 10
    return found


def test_the_rest_has_the_bits_that_it_has_without_them(runs, excluded):
    folder = runs[0]
    clean = pq.read_table(folder / "clean" / "windows.parquet").to_pandas()
    left = clean[~clean.window_id.isin(excluded)]
    gone = clean[clean.window_id.isin(excluded)]
    result = result_of(folder / "1")
    assert result["nll_sum"] == math.fsum(left.nll_sum)
    assert result["num_tokens"] == left.num_tokens.sum()
    assert result["num_windows"] == len(left)
    assert result["num_excluded_tokens"] == gone.num_tokens.sum()
    assert result["ce_loss"] == pytest.approx(math.fsum(left.nll_sum) / left.num_tokens.sum(), rel=1e-15)
    # What the windows covered leaves the denominators too.
    assert (result["num_bytes"], result["num_words"]) == (left.num_bytes.sum(), left.num_words.sum())
    assert result["coverage"]["excluded_windows"] == excluded
    assert result["coverage"]["excluded_tokens"] == gone.num_tokens.sum()
    assert result["coverage"]["expected_tokens"] == clean.num_tokens.sum()
    for name in ("a", "b"):
        domain, of = result["domains"][name], left[left.domain == name]
        assert domain["nll_sum"] == math.fsum(of.nll_sum)
        assert domain["num_tokens"] == of.num_tokens.sum()
        assert domain["num_bytes"] == of.num_bytes.sum()
        assert domain["num_excluded_tokens"] == gone[gone.domain == name].num_tokens.sum()
    positions = result["positions"]
    for name in ("num_tokens", "num_excluded_tokens"):
        assert sum(bucket[name] for bucket in positions) == result[name]
    assert math.fsum(bucket["nll_sum"] for bucket in positions) == pytest.approx(result["nll_sum"], rel=1e-15)


def test_every_file_says_what_it_leaves_out(runs, excluded):
    folder = runs[0]
    clean, windows, before, documents = (
        pq.read_table(folder / run / f"{name}.parquet").to_pandas()
        for name in ("windows", "documents")
        for run in ("clean", "1")
    )
    assert windows[windows.num_excluded > 0].window_id.tolist() == excluded
    gone = windows.window_id.isin(excluded)
    assert windows[~gone].equals(clean[~gone])
    assert windows[gone].num_excluded.tolist() == clean[gone].num_tokens.tolist()
    assert (windows[gone][["num_tokens", "num_correct", "nll_sum", "nll_sq_sum"]] == 0).all().all()
    assert (documents.num_tokens + documents.num_excluded).tolist() == before.num_tokens.tolist()
    assert documents.nll_sum.sum() == pytest.approx(result_of(folder / "1")["nll_sum"], rel=1e-14)
    assert documents.num_bytes.sum() == result_of(folder / "1")["num_bytes"]
    tokens, all_tokens = (
        pq.read_table(folder / run / "tokens.parquet").to_pandas() for run in ("1", "clean")
    )
    assert tokens.equals(all_tokens[~all_tokens.window_id.isin(excluded)].reset_index(drop=True))


def test_it_is_shown_wherever_the_number_is(runs, excluded):
    folder, alone, merged, _ = runs
    result = result_of(folder / "1")
    (note,) = [note for note in result["notes"] if note.startswith("nan: exclude")]
    assert f"{len(excluded)} windows with {result['num_excluded_tokens']} of" in note
    assert f": {excluded[0]} (document 1, from its token " in note
    for output in (alone, merged):
        assert f"{len(excluded)} windows, {result['num_excluded_tokens']} tokens: their NLL is not" in output
        assert note in output
    assert f"window {excluded[0]} (document 1, from its token" in alone
    assert "is left out (nan: exclude)" in alone
    for domain in result["domains"].values():
        assert f" ({domain['num_excluded_tokens']} left out)" in alone
    assert [note for note in result_of(folder / "merged")["notes"] if "nan" in note] == [note]


def test_ranks_a_resumed_run_and_parts_agree(runs):
    folder = runs[0]
    expected, _ = everything(folder / "1")
    result = json.loads(expected[0])
    assert result.pop("against_baseline") is not None
    expected = (json.dumps(result), expected[1])
    assert everything(folder / "2") == (expected, 6), "resumed"
    assert everything(folder / "3") == (expected, 0)
    found = result_of(folder / "merged")
    assert found["plan"].pop("num_parts") == 3
    (folder / "merged" / "result.json").write_text(json.dumps(found))
    assert everything(folder / "merged")[0] == expected


def test_the_ledger_holds_what_was_left_out(runs, excluded):
    records = read_ledger(ledger_of(runs[0] / "held"), record_dtype(NUM_BUCKETS))
    assert records.dtype == record_dtype(NUM_BUCKETS)
    there = np.isin(records["window_id"], excluded)
    assert there.any()
    assert ((records["num_excluded"] > 0) == there).all()
    assert (records["bucket_excluded"].sum(axis=1) == records["num_excluded"]).all()


def test_a_baseline_is_compared_over_what_both_scored(runs, excluded):
    folder, alone, _, _ = runs
    shared = result_of(folder / "1")["against_baseline"]
    assert shared["num_windows"] == 37 - len(excluded)
    assert shared["same_bits"]
    assert f"agrees with the baseline over the {37 - len(excluded)} windows that both share" in alone
    assert "excluded because their NLL is not finite: windows " in alone
    assert "here, none in the baseline" in alone
    findings = doctor_diff.explain(result_of(folder / "clean"), result_of(folder / "1"))
    causes = [finding.what for finding in findings if ": " in finding.what]
    assert causes[0].startswith("NaN exclusions: ")
    lines = doctor_diff.windows_that_differ(folder / "clean", folder / "1")
    assert lines[-1].found == "the same NLL, bit for bit"


def test_an_error_names_the_window_and_a_resumed_run_does_not_take_exclusions_over(runs, excluded, tmp_path):
    folder, *_, env = runs
    shutil.copytree(folder / "held", tmp_path / "held")
    argv = ["-m", "distributed_ppl_eval", "--config", str(folder / "broken.yaml")]
    finished = ranks([[*argv, f"output_dir={tmp_path / 'held'}", "resume=require"]], tmp_path, [env])
    assert finished.code == 2, finished.output
    assert f"error: window {excluded[0]} (document 1, from its token" in finished.output
    assert "nan=exclude leaves such windows out" in finished.output
    assert "resumed: " in finished.output
    # The same command goes on with the other rule, from what is done.
    argv += [f"output_dir={tmp_path / 'held'}", "resume=require", "nan=exclude"]
    finished = ranks([argv], tmp_path, [env])
    assert finished.code == 0, finished.output
    found, resumed = everything(tmp_path / "held")
    assert resumed >= 6
    assert found == everything(folder / "3")[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=1"],
        ["context_parallel_dim=2"],
        ["tensor_parallel_dim=2"],
    ],
    ids=["alone", "fsdp", "cp", "tp"],
)
def test_debug_nan_names_module_and_token(runs, excluded, tmp_path, overrides):
    """In a rerun of the batch, or, where ranks that score other windows share the forward, in every one."""
    folder, *_, env = runs
    tokens = pq.read_table(folder / "clean" / "tokens.parquet").to_pylist()
    (at,) = [
        token["position"]
        for token in tokens
        if token["document"] == 1 and token["text"].strip() == nan_model.BROKEN
    ]
    argv = ["-m", "distributed_ppl_eval", "--config", str(folder / "broken.yaml"), "debug_nan=true"]
    argv += [f"output_dir={tmp_path / 'out'}", "timeout_seconds=20", *overrides]
    num_ranks = 2 if overrides else 1
    finished = ranks([argv] * num_ranks, tmp_path, [env] * num_ranks)
    assert set(finished.codes) == {2}, finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert f"window {excluded[0]} (document 1, from its token" in line
    assert "the first output that is not finite is that of tok_embeddings (" in line
    assert "holds 64 values that are not finite" in line
    if overrides != ["context_parallel_dim=2"]:
        assert f"; first in window {excluded[0]}, at token {at} of its document" in line


def test_nothing_left_is_an_error(runs, tmp_path):
    folder, *_, env = runs
    text = tmp_path / "text.txt"
    text.write_text(nan_model.BROKEN + TEXT[:20], encoding="utf-8")
    keys = {"protocol": KEYS["protocol"], "model": nan_model.MODEL, "nan": "exclude", "max_windows": 1}
    config = write_config(tmp_path / "c.yaml", folder / "broken", text, **keys)
    finished = ranks([["-m", "distributed_ppl_eval", "--config", str(config)]], tmp_path, [env])
    assert finished.code == 2, finished.output
    assert "nothing is left: the NLL of 1 of 1 windows is not finite" in finished.output
    assert not (tmp_path / "out" / "result.json").exists()
