"""``tokens.parquet``: the same files for any number of ranks, sums that are the run's bits, figures that are
transformers' own."""

import math

import duckdb
import numpy as np
import pandas
import polars
import pyarrow.parquet as pq
import pytest
import torch

from helpers.runs import many, result_of
from helpers.tiny import write_config

CASES = {
    "documents": ["dataset.unit=line", "protocol=ppl_eval.protocols.rolling", "protocol.max_seq_len=16"],
    "overlapping": ["protocol=ppl_eval.protocols.strided", "protocol.max_seq_len=64", "protocol.stride=24"],
    "bf16": ["dtype=bf16", "max_windows=9"],
}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Folders of all cases, by case and number of ranks."""
    scratch = tmp_path_factory.mktemp("tokens")
    config = write_config(
        scratch / "config.yaml", tiny.folder, tiny.text, per_token=True, per_window=True, batch_size=3
    )
    folders = {}
    for ranks in (1, 2, 3):
        folders |= {(name, ranks): scratch / f"{name}_{ranks}" for name in CASES}
        argvs = [
            ["--config", str(config), *overrides, f"output_dir={folders[name, ranks]}"]
            for name, overrides in CASES.items()
        ]
        env = {"OMP_NUM_THREADS": "4" if ranks == 1 else "1", "PPL_EVAL_HOME": str(scratch / "home")}
        finished = many(ranks, argvs, scratch, env)
        assert finished.code == 0, finished.output
    plain = ["--config", str(config), *CASES["bf16"], f"output_dir={scratch / 'plain'}", "per_token=false"]
    assert many(1, [plain], scratch).code == 0
    folders["plain", 1] = scratch / "plain"
    return folders


def test_the_files_are_the_same_for_any_number_of_ranks(runs):
    for name in CASES:
        contents = []
        for ranks in (1, 2, 3):
            folder = runs[name, ranks]
            assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == [
                "result.json",
                "tokens.parquet",
                "windows.parquet",
            ]
            parts = sorted((folder / "tokens.parquet").iterdir())
            contents.append({part.name: part.read_bytes() for part in parts})
        assert contents[0] == contents[1] == contents[2], name


def test_sums_are_the_bits_of_the_windows_and_of_the_run(runs):
    for name in CASES:
        folder = runs[name, 2]
        tokens = pandas.read_parquet(folder / "tokens.parquet")
        windows = pandas.read_parquet(folder / "windows.parquet").set_index("window_id")
        result = result_of(folder)
        assert len(tokens) == result["num_tokens"]
        sums = tokens.nll.astype(np.float64).groupby(tokens.window_id).agg(math.fsum)
        assert (sums == windows.nll_sum[sums.index]).all()
        assert math.fsum(tokens.nll.astype(np.float64)).hex() == result["nll_sum_hex"]
        correct = (tokens["rank"] == 1).groupby(tokens.window_id).sum()
        assert (correct == windows.num_correct[correct.index]).all()
        assert ((tokens["rank"] == 1) == (tokens.token == tokens.top_token)).all()
        assert (np.diff(tokens.window_id) >= 0).all()


def test_asking_for_tokens_changes_no_bit_of_the_result(runs):
    assert result_of(runs["plain", 1])["nll_sum_hex"] == result_of(runs["bf16", 1])["nll_sum_hex"]


def test_rank_entropy_and_nll_are_those_of_transformers(runs, tiny):
    tokens = pandas.read_parquet(runs["overlapping", 1] / "tokens.parquet")
    windows = pandas.read_parquet(runs["overlapping", 1] / "windows.parquet")
    stream = _encode(tiny)
    for window in windows.itertuples():
        here = tokens[tokens.window_id == window.window_id]
        with torch.no_grad():
            logits_TV = tiny.twin(torch.tensor([stream[window.start : window.stop]])).logits[0].double()
        rows = torch.tensor(here.position.to_numpy() - window.start - 1)
        logp_NV = logits_TV[rows].log_softmax(dim=1)
        targets = torch.tensor(here.token.to_numpy()).long()
        assert targets.tolist() == stream[window.score_start : window.stop]
        target_N = logp_NV.gather(1, targets[:, None])
        np.testing.assert_allclose(here.nll, -target_N[:, 0], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(here.entropy, -(logp_NV.exp() * logp_NV).sum(dim=1), rtol=2e-5, atol=1e-6)
        assert here["rank"].tolist() == (1 + (logp_NV > target_N).sum(dim=1)).tolist()
        assert here.top_token.tolist() == logp_NV.argmax(dim=1).tolist()


def test_text_and_byte_offsets_are_those_of_the_document(runs, tiny):
    lines = [line for line in tiny.text.read_text(encoding="utf-8").splitlines() if line]
    tokens = pandas.read_parquet(runs["documents", 3] / "tokens.parquet")
    assert tokens.document.nunique() == len(lines)
    for document, here in tokens.groupby("document"):
        raw = lines[document].encode()
        assert here.position.tolist() == list(range(len(here)))
        ends = here.byte_offset + here.num_bytes
        assert here.byte_offset.tolist() == [0, *ends[:-1]]
        assert ends.iloc[-1] == len(raw)
        for text, begin, end in zip(here.text, here.byte_offset, ends, strict=True):
            assert text == raw[begin:end].decode(errors="replace") or "\ufffd" in text


def test_parts_are_read_as_one_table(runs, tmp_path, tiny):
    folder = runs["documents", 2] / "tokens.parquet"
    assert pq.read_table(folder).num_rows == result_of(folder.parent)["num_tokens"]
    frame = polars.read_parquet(folder)
    ((total,),) = duckdb.sql(f"select count(*) from '{folder}/*.parquet'").fetchall()
    assert len(frame) == total == result_of(folder.parent)["num_tokens"]


def _encode(tiny):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.folder / "tokenizer.json"))
    return tokenizer.encode(tiny.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
