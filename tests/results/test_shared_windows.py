"""A baseline over other windows: what both scored is compared, and only that."""

import random

import pytest

from helpers.runs import many, result_of
from helpers.tiny import write_config


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """Exit code, output and result of every run, each held against the first."""
    scratch = tmp_path_factory.mktemp("shared")
    lines = tiny.text.read_text(encoding="utf-8").splitlines()
    shuffled = scratch / "shuffled.txt"
    random.Random(0).shuffle(lines)
    shuffled.write_text("\n".join(lines[:80]) + "\n", encoding="utf-8")
    config = write_config(
        scratch / "config.yaml",
        tiny.folder,
        tiny.text,
        per_window=True,
        batch_size=1,
        protocol={"_component_": "ppl_eval.protocols.rolling", "max_seq_len": 64},
    )
    one = ["--config", str(config), "dataset.unit=line", f"baseline={scratch / 'first' / 'result.json'}"]
    cases = {
        "first": ["max_windows=30", "~baseline"],
        "more": ["max_windows=60"],
        "exact": [],
        "subset": [f"dataset.paths=[{shuffled}]"],
        "bf16": ["dtype=bf16", "max_windows=12"],
        "lengths": ["protocol.max_seq_len=32"],
        "no_table": ["per_window=false"],
        "none_shared": ["dataset.unit=file", "max_windows=3"],
    }
    found = {}
    for name, overrides in cases.items():
        run = many(1, [[*one, *overrides, f"output_dir={scratch / name}"]], scratch, {"OMP_NUM_THREADS": "1"})
        # What means another thing is known, and refused, before any window is scored.
        found[name] = run.code, run.output, None if name == "lengths" else result_of(scratch / name)
    return found


@pytest.mark.parametrize(("name", "windows"), [("more", 30), ("exact", 30), ("subset", None)])
def test_shared_windows_of_the_same_model_agree(results, name, windows):
    code, output, result = results[name]
    assert code == 0, output
    against = result["against_baseline"]
    assert against["same_bits"]
    assert against["num_windows_in_baseline"] == 30
    if windows is None:
        assert 5 < against["num_windows"] < 30
    else:
        assert against["num_windows"] == windows
    assert f"agrees with the baseline over the {against['num_windows']} windows" in output


def test_another_model_is_compared_and_gated_over_what_both_have(results):
    code, output, result = results["bf16"]
    assert code == 3, output
    against = result["against_baseline"]
    assert against["num_windows"] == against["num_windows_here"] == 12
    assert against["ce_loss"] == pytest.approx(result["ce_loss"], rel=1e-12)
    assert against["ce_loss_difference"] != 0
    assert against["ce_loss_difference_stderr"] > 0
    assert "paired over 12 windows that both share of 12 here and 30 in the baseline" in output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lengths", "protocol.max_seq_len: 32 here, 64"),
        ("no_table", "per_window=true in both"),
        ("none_shared", "the baseline measured something else"),
    ],
)
def test_windows_that_mean_another_thing_are_refused(results, name, words):
    code, output, result = results[name]
    assert code == 4, output
    assert words in output
    assert result is None or result["against_baseline"] is None
