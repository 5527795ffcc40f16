"""Memory that runs out while scoring: batches go through the model in parts, with the same bits, or the run
ends and says what would fit. The address space is limited, so that torch's allocator fails for real."""

from pathlib import Path

import pytest

from helpers.runs import ranks, result_of
from helpers.tiny import MODEL, TEXT, write_config, write_model, write_tokenizer

LITTLE = str(Path(__file__).parents[1] / "helpers" / "little_memory.py")
PLENTY_MIB, LITTLE_MIB = 100_000, 64
# A wide MLP: one of its activations takes 2 MiB a window of 256 tokens, 64 a batch, or a window of 8,192.
WIDTH, BATCH_SIZE, LONG = 2048, 32, 8192


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    write_tokenizer(folder)
    write_model(folder, intermediate_dim=WIDTH, max_seq_len=LONG)
    text = folder / "text.txt"
    text.write_text(TEXT * 3, encoding="utf-8")
    return write_config(
        folder / "config.yaml",
        folder,
        text,
        model={**MODEL, "intermediate_dim": WIDTH, "max_seq_len": LONG},
        protocol={"_component_": "ppl_eval.protocols.disjoint", "max_seq_len": 256},
        batch_size=BATCH_SIZE,
        max_logits_mib=1,
    )


def scored(config, out, little_mib, *overrides, env=None):
    """One rank for each of these amounts of memory."""
    envs = [
        {"LITTLE_MIB": str(mib), "PPL_EVAL_HOME": str(config.parent / "home"), **(env or {})}
        for mib in little_mib
    ]
    argv = [LITTLE, "--config", str(config), f"output_dir={out}", "timeout_seconds=20", *overrides]
    return ranks([argv] * len(little_mib), config.parent, envs)


@pytest.fixture(scope="module")
def plenty(config):
    finished = scored(config, config.parent / "plenty", [PLENTY_MIB])
    assert finished.code == 0, finished.output
    result = result_of(config.parent / "plenty")
    assert result["plan"]["windows_in_parts"] == 0
    assert result["timing"]["per_rank"]["windows_at_once"]["min"] == BATCH_SIZE
    assert not [note for note in result["notes"] if "memory ran out" in note]
    return result


@pytest.mark.parametrize(
    ("little_mib", "threads"), [([LITTLE_MIB], 1), ([LITTLE_MIB], 2), ([LITTLE_MIB, PLENTY_MIB], 1)]
)
def test_batches_are_halved_with_the_same_bits(config, plenty, tmp_path, little_mib, threads):
    finished = scored(config, tmp_path, little_mib, env={"OMP_NUM_THREADS": str(threads)})
    assert finished.code == 0, finished.output
    result = result_of(tmp_path)
    assert result["timing"]["per_rank"]["windows_at_once"]["min"] < BATCH_SIZE
    # The second batch has seven windows, which fit, be it here or on the other rank.
    assert result["plan"]["windows_in_parts"] in (BATCH_SIZE, result["num_windows"])
    for name in ("nll_sum_hex", "num_tokens", "coverage", "key"):
        assert result[name] == plenty[name]
    assert result["plan"]["batch_size"] == BATCH_SIZE
    assert "rank 0 on " in finished.output
    assert f"ran out of memory with {BATCH_SIZE} windows: batches go through the model " in finished.output
    (note,) = [note for note in result["notes"] if "memory ran out" in note]
    assert note == (
        f"memory ran out, so {result['plan']['windows_in_parts']} of {result['num_windows']} windows went"
        f" through the model in smaller batches than of {BATCH_SIZE}. The bits are the same"
    )
    # Two batches at once share the memory: the first thing is to leave that.
    assert ("the model one at a time from here on" in finished.output) == (threads == 2)


def test_bits_that_may_depend_on_the_batch_are_no_reason_to_refuse(config, plenty, tmp_path):
    finished = scored(config, tmp_path, [LITTLE_MIB], "dtype=fp64")
    assert finished.code == 0, finished.output
    result = result_of(tmp_path)
    assert result["ce_loss"] == pytest.approx(plenty["ce_loss"], rel=1e-5)
    (note,) = [note for note in result["notes"] if "memory ran out" in note]
    assert note.endswith(
        "Other batches may have other last bits: products in float64 are chosen by the shape of a batch"
    )


def test_a_window_that_does_not_fit_alone_ends_the_run_and_says_what_would(config, tmp_path):
    finished = scored(
        config, tmp_path, [LITTLE_MIB], f"protocol.max_seq_len={LONG}", env={"OMP_NUM_THREADS": "1"}
    )
    assert finished.code == 1, finished.output
    last = finished.output.strip().splitlines()[-1]
    assert "is out of memory in phase 'scoring'" in last
    assert "while scoring window 0 (document 0)" in last
    assert (
        "It was tried with one window of 8192 tokens. Less is needed with protocol.max_seq_len=4096" in last
    )
    assert "data_parallel_shard_dim=-1" in last


def test_ranks_that_share_forwards_end_together_and_say_what_would_fit(config, tmp_path):
    sharded = ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=1"]
    finished = scored(config, tmp_path, [LITTLE_MIB, PLENTY_MIB], *sharded)
    assert finished.codes == (1, 1), finished.output
    (line,) = [line for line in finished.output.splitlines() if line.startswith("error: ")]
    assert "rank 0 on " in line
    assert f"with {BATCH_SIZE} windows at once; ranks share every forward here" in line
    assert f"Less is needed with batch_size={BATCH_SIZE // 2}" in line
