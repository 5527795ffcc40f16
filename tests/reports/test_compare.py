"""Finished runs beside a base, with numbers that can be followed by hand."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.finished_runs import FINGERPRINT, write_documents, write_run
from ppl_eval.commands.cli import main
from ppl_eval.metrics.standard_error import holm, two_sided_p
from ppl_eval.reports.compare import compare_runs
from ppl_eval.reports.runs import read_runs
from ppl_eval.reports.terminal import printable

TOKENS = [10] * 6
BASE = [20.0, 30.0, 40.0, 20.0, 30.0, 40.0]
WORSE = [21.0, 31.0, 43.0, 21.0, 31.0, 41.0]  # 8 nats more of 60 tokens


def code_of(*arguments: str | Path) -> int:
    try:
        main(["compare", *map(str, arguments)])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_p_values_are_those_of_students_t() -> None:
    """With one degree of freedom t is Cauchy's; for 4, P(|t| > 2.776445) is 0.05 by every table."""
    assert two_sided_p(1.0, 1) == pytest.approx(0.5, abs=1e-9)
    assert two_sided_p(2.7764451, 4) == pytest.approx(0.05, rel=1e-6)
    assert two_sided_p(0.0, 7) == 1.0
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])


def test_the_ratio_and_its_interval_by_hand(tmp_path: Path) -> None:
    base, other = read_runs(
        [write_run(tmp_path / "a", BASE, TOKENS), write_run(tmp_path / "b", WORSE, TOKENS)]
    )
    (found,) = compare_runs(base, [other])["comparisons"]
    mean = 8 / 60
    # Blocks are the six windows: residuals 1 - 4/3 five times, 3 - 4/3 once.
    stderr = math.sqrt(6 / 5 * (5 * (1 / 3) ** 2 + (5 / 3) ** 2)) / 60
    assert found["perplexity_ratio"] == pytest.approx(math.exp(mean))
    assert found["ce_loss_difference_stderr"] == pytest.approx(stderr)
    low, high = found["ce_loss_difference_interval_95"]
    assert (high - low) / 2 == pytest.approx(2.570582 * stderr, rel=1e-3)  # t with 5 degrees
    assert found["p_value"] == found["p_value_holm"] == two_sided_p(mean / stderr, 5)
    assert found["num_windows_worse"] == 6
    assert found["worse_windows"][0]["window_id"] == 2
    assert found["worse_windows"][0]["ce_loss_difference"] == pytest.approx(0.3)


def test_several_runs_share_one_correction(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, nll, TOKENS) for name, nll in (("a", BASE), ("b", WORSE), ("c", BASE))]
    found = compare_runs(*(lambda all_: (all_[0], all_[1:]))(read_runs(runs)))
    one, two = found["comparisons"]
    assert one["p_value_holm"] == pytest.approx(2 * one["p_value"])
    assert (two["same_bits"], two["p_value_holm"], two["perplexity_ratio"]) == (True, 1.0, 1.0)
    assert "Holm over 2 comparisons" in found["correction"]


def test_domains_documents_and_windows_that_both_share(tmp_path: Path) -> None:
    domains, documents = ["x", "x", "x", "y", "y", "y"], [0, 0, 1, 2, 2, 3]
    a = write_run(tmp_path / "a", BASE, TOKENS, documents, domains)
    b = write_run(tmp_path / "b", WORSE[1:], TOKENS[1:], documents[1:], domains[1:], list(range(101, 106)))
    base, other = read_runs([a, b])
    (found,) = compare_runs(base, [other])["comparisons"]
    assert found["num_windows"] == 5
    assert found["ce_loss_difference"] == pytest.approx(7 / 50)
    assert found["notes"] == ["5 windows are shared, of 6 and 5; the difference is over these"]
    assert found["domains"]["x"]["ce_loss_difference"] == pytest.approx(4 / 20)
    assert found["domains"]["y"]["ce_loss_difference"] == pytest.approx(3 / 30)
    assert found["documents"]["worst"][0] == {"document": 1, "ce_loss_difference": pytest.approx(0.3)}


def test_other_tokenizers_are_compared_by_bytes(tmp_path: Path) -> None:
    other = {"dataset": {"fingerprint": {**FINGERPRINT, "tokenizer_sha256": "other"}}}
    bytes_D = [40] * 6
    a = write_run(tmp_path / "a", BASE, TOKENS, bits_per_byte=180 / 240 / math.log(2))
    b = write_run(tmp_path / "b", WORSE, [8] * 6, bits_per_byte=188 / 240 / math.log(2), **other)
    write_documents(a, BASE, TOKENS, bytes_D)
    write_documents(b, WORSE, [8] * 6, bytes_D)
    (found,) = compare_runs(*(lambda two: (two[0], two[1:]))(read_runs([a, b])))["comparisons"]
    assert found["kind"] == "bytes"
    assert found["bits_per_byte_difference"] == pytest.approx(8 / 240 / math.log(2))
    stderr = math.sqrt(6 / 5 * (5 * (1 / 3) ** 2 + (5 / 3) ** 2)) / 240 / math.log(2)
    assert found["bits_per_byte_difference_stderr"] == pytest.approx(stderr)
    assert "perplexity_ratio" not in found
    assert "kl" not in found
    assert code_of(a, b) == 0
    assert code_of(a, b, "--max-kl", "1") == 4, "a limit that cannot be checked is not kept"
    other["dataset"]["fingerprint"]["text_sha256"] = "another text"
    c = write_run(tmp_path / "c", WORSE, [8] * 6, bits_per_byte=1.0, **other)
    assert code_of(a, c) == 4


def test_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = {"checkpoint": {"weights_hash": "w"}, "quantizer": None}
    kl = {"comparison": {"kl_mean": 0.02, "same_top": 0.9}, "reference": reference}
    a, b = write_run(tmp_path / "a", BASE, TOKENS), write_run(tmp_path / "b", WORSE, TOKENS, **kl)
    assert code_of(a, b) == 0
    assert code_of(a, b, "--max-ppl-ratio", "1.15", "--max-kl", "0.03") == 0
    assert code_of(a, b, "--max-ppl-ratio", "1.14") == 3
    assert "b: perplexity ratio 1.142631 is above 1.14" in capsys.readouterr().err
    assert code_of(a, b, "--max-kl", "0.01") == 3
    assert code_of(b, a, "--max-kl", "0.01") == 4, "no KL divergence in the records"
    kl["reference"] = {**reference, "checkpoint": {"weights_hash": "another"}}
    c = write_run(tmp_path / "c", WORSE, TOKENS, **kl)
    assert code_of(a, c, "--max-kl", "1") == 4, "from another reference than the base"
    assert code_of(a, tmp_path / "nowhere") == 2
    capsys.readouterr()
    assert code_of(a, b, "--json", "--max-kl", "0.01") == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["exit_code"], len(said["exceeded"])) == (3, 1)


def test_text_of_worse_windows_cannot_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write_run(tmp_path / "a", BASE, TOKENS), write_run(tmp_path / "b", WORSE, TOKENS)
    rows = {"window_id": [2, 2], "position": [0, 1], "token": [5, 6], "text": ["[red]\x1b[31m", " 漢字"]}
    (b / "tokens.parquet").mkdir()
    pq.write_table(pa.table(rows), b / "tokens.parquet" / "part-000000.parquet")
    (found,) = compare_runs(*(lambda two: (two[0], two[1:]))(read_runs([a, b])))["comparisons"]
    assert found["worse_windows"][0]["text"] == "[red]\x1b[31m 漢字"
    assert code_of(a, b) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]" in out
    assert printable("a\x1bb\u202e") == "a\ufffdb\ufffd"
