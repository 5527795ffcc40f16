"""Several context lengths in one run: each has the bits of a run of its own."""

import json

import pytest

from helpers.runs import many, ranks, result_of
from helpers.tiny import write_config

LENGTHS = [64, 16, 200]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("lengths")
    config = write_config(
        scratch / "config.yaml", tiny.folder, tiny.text, batch_size=3, per_token=True, per_window=True
    )
    env = {"PPL_EVAL_HOME": str(scratch / "home")}
    one = ["--config", str(config)]
    alone = [
        [*one, f"protocol.max_seq_len={length}", f"output_dir={scratch / 'alone' / str(length)}"]
        for length in LENGTHS
    ]
    finished = many(1, alone, scratch, env)
    assert finished.code == 0, finished.output
    outputs = {}
    for processes in (1, 2, 3):
        argv = [*one, f"protocol.max_seq_len={LENGTHS}", f"output_dir={scratch / str(processes)}"]
        finished = many(processes, [argv], scratch, env)
        assert finished.code == 0, finished.output
        outputs[processes] = finished.output
    return scratch, outputs


def test_every_length_has_the_bits_of_a_run_of_its_own(runs):
    scratch, _ = runs
    for length in LENGTHS:
        alone = scratch / "alone" / str(length)
        expected = result_of(alone)
        assert expected["protocol"]["max_seq_len"] == length
        for processes in (1, 2, 3):
            folder = scratch / str(processes) / str(length)
            found = result_of(folder)
            for name in (
                "nll_sum_hex",
                "num_tokens",
                "coverage",
                "protocol",
                "plan",
                "model",
                "notes",
                "key",
            ):
                assert found[name] == expected[name], (length, processes, name)
            assert sorted(path.name for path in folder.iterdir()) == sorted(
                path.name for path in alone.iterdir()
            )
            for part in (alone / "tokens.parquet").iterdir():
                assert (folder / "tokens.parquet" / part.name).read_bytes() == part.read_bytes()


def test_the_model_is_loaded_once_and_the_table_has_every_length(runs):
    scratch, outputs = runs
    for processes, output in outputs.items():
        assert output.count("model loaded in") == 1
        rows = json.loads((scratch / str(processes) / "lengths.json").read_text())["lengths"]
        assert [row["max_seq_len"] for row in rows] == LENGTHS
        for row in rows:
            result = result_of(scratch / str(processes) / row["folder"])
            assert row["ce_loss"] == result["ce_loss"]
            assert f"{row['max_seq_len']}  {row['ce_loss']:>14.9f}" in output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["protocol.max_seq_len=[]"], "or a list of different ones"),
        (["protocol.max_seq_len=[8,8]"], "or a list of different ones"),
        (["protocol.max_seq_len=[8,eight]"], "or a list of different ones"),
        (["protocol.max_seq_len=[8,16]", "baseline=x.json"], "baseline is for one context length"),
        # Found before anything is scored, though the first would do.
        (["protocol.max_seq_len=[8,512]"], "protocol.max_seq_len is 512, but the model was built for 256"),
    ],
)
def test_refused(tiny, tmp_path, private_home, overrides, words):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    finished = ranks([["-m", "distributed_ppl_eval", "--config", str(config), *overrides]], tmp_path)
    assert finished.code == 2, finished.output
    assert words in finished.output
    assert not list((tmp_path / "out").rglob("result.json"))
