"""The recipe over a mesh: whole runs of four processes against a run of one."""

import pytest

from helpers.runs import many, result_of
from helpers.tiny import write_config

COMMON = ["dtype=fp32", "protocol.max_seq_len=64", "max_windows=37", "batch_size=2"]
SHARD, CP, TP = "data_parallel_shard_dim", "context_parallel_dim", "tensor_parallel_dim"
EXACT = {
    "fsdp4": [f"{SHARD}=4"],
    "fsdp_inferred": [f"{SHARD}=-1"],
    "hsdp2x2": [f"{SHARD}=2"],
    "hsdp2x2_static": [f"{SHARD}=2", "schedule=static"],
    "fsdp_kept": [f"{SHARD}=4", "fsdp_reshard_after_forward=false"],
}
CLOSE = {
    "dp2_tp2": [f"{TP}=2"],
    "fsdp2_tp2": [f"{SHARD}=2", f"{TP}=2"],
    "cp4": [f"{CP}=4"],
    "fsdp2_cp2": [f"{SHARD}=2", f"{CP}=2"],
    "dp2_tp2_static": [f"{TP}=2", "schedule=static"],
    "cp2_tp2": [f"{CP}=2", f"{TP}=2"],
}


def test_runs_over_a_mesh(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)

    def arguments(name, overrides):
        return ["--config", str(config), *COMMON, *overrides, f"output_dir={tmp_path / name}"]

    finished = many(1, [arguments("alone", [])], tmp_path)
    assert finished.code == 0, finished.output
    alone = result_of(tmp_path / "alone")
    cases = EXACT | CLOSE
    # Threads for two batches at once, which must not be: ranks that share forwards make them in step. Once,
    # as eight threads take long on few cores.
    for names, threads in ((["fsdp4"], "2"), ([name for name in cases if name != "fsdp4"], "1")):
        argvs = [arguments(name, cases[name]) for name in names]
        finished = many(4, argvs, tmp_path, {"OMP_NUM_THREADS": threads})
        assert finished.code == 0, finished.output
    for name in cases:
        result = result_of(tmp_path / name)
        for key in ("num_tokens", "num_windows", "coverage", "top1_accuracy"):
            assert result[key] == alone[key], (name, key)
        if name in EXACT:
            assert result["nll_sum_hex"] == alone["nll_sum_hex"], name
        else:
            assert result["nll_sum"] == pytest.approx(alone["nll_sum"], rel=1e-6), name
    assert result_of(tmp_path / "hsdp2x2")["parallel"] == {
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 1,
        "tp": 1,
        "world_size": 4,
        "num_nodes": 1,
        "schedule": "dynamic",
    }


@pytest.mark.slow
def test_degrees_that_do_not_fit_end_the_run_in_words(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    argv = ["--config", str(config), f"{TP}=3", f"output_dir={tmp_path / 'out'}"]
    finished = many(2, [argv], tmp_path)
    assert finished.code != 0
    assert finished.output.count("= 3, but there are 2 processes") == 1


@pytest.mark.slow
def test_compiled_layers_over_a_mesh(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    cases = {"dp2": [], "fsdp2": [f"{SHARD}=2"], "cp2": [f"{CP}=2"], "tp2": [f"{TP}=2"]}
    argvs = [
        ["--config", str(config), *COMMON, "compile=true", *overrides, f"output_dir={tmp_path / name}"]
        for name, overrides in cases.items()
    ]
    finished = many(2, argvs, tmp_path)
    assert finished.code == 0, finished.output
    results = {name: result_of(tmp_path / name) for name in cases}
    assert results["fsdp2"]["nll_sum_hex"] == results["dp2"]["nll_sum_hex"]
    for name in ("cp2", "tp2"):
        assert results[name]["nll_sum"] == pytest.approx(results["dp2"]["nll_sum"], rel=1e-6)
