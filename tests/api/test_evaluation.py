"""``evaluate`` in a program of its own and under a process group that is there: the recipe's bits, the
recipe's messages, and a process that is left as it was."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.processes import run_ranks
from helpers.runs import many, result_of
from helpers.tiny import write_config
from ppl_eval import EvaluationError, InputError, Result, evaluate

OPTIONS = {"max_windows": 9, "protocol.max_seq_len": 32, "position_buckets": 2}


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    return write_config(folder / "config.yaml", tiny.folder, tiny.text)


@pytest.fixture(scope="module")
def of_recipe(config, tmp_path_factory):
    """The result file of the recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    argv = ["--config", str(config), f"output_dir={folder}", *(f"{k}={v}" for k, v in OPTIONS.items())]
    finished = many(1, [argv], folder)
    assert finished.code == 0, finished.output
    return result_of(folder)


def process_state():
    """What an evaluation must leave as it was."""
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "torch": torch.get_rng_state().tolist(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "groups": set(dist.distributed_c10d._world.pg_map),
        "path": list(sys.path),
        "umask": os.umask(0o022),
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
        "grad": torch.is_grad_enabled(),
        "gc": (gc.isenabled(), gc.get_freeze_count() > 0),
    }


def same_question(result):
    """What must not depend on who asked, and on how many ranks."""
    mine = {"timing", "run", "parallel", "notes", "plan"}
    return {key: value for key, value in result.items() if key not in mine}


def test_alone_it_gives_the_bits_of_the_recipe(config, of_recipe, tmp_path):
    before = process_state()
    result = evaluate(config, overrides={**OPTIONS, "output_dir": tmp_path / "out"})
    assert process_state() == before
    assert not dist.is_initialized()
    assert same_question(result.content) == same_question(of_recipe)
    assert result.perplexity == of_recipe["perplexity"]
    assert result.interval == tuple(of_recipe["perplexity_interval_95"])
    assert result.windows.num_rows == 9
    assert sum(result.windows["num_tokens"].to_pylist()) == result.num_tokens
    assert result_of(tmp_path / "out") == result.content


@run_ranks(1, 2)
def test_under_a_group_every_rank_gets_the_bits_of_the_recipe(config, of_recipe, tmp_path, world_size):
    torch.manual_seed(5 + dist.get_rank())
    before = process_state()
    results = [
        evaluate(config, overrides={**OPTIONS, "output_dir": str(tmp_path), **more})
        for more in ({}, {"data_parallel_shard_dim": -1, "aggregation.topology": "hierarchical"})
    ]
    assert process_state() == before
    # The group is the program's, and works.
    assert dist.get_world_size() == world_size
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == world_size
    for result in results:
        assert result["nll_sum_hex"] == of_recipe["nll_sum_hex"]
        assert result["parallel"]["world_size"] == world_size
    if dist.get_rank() == 0:
        assert results[0].windows.num_rows == 9
    else:
        with pytest.raises(ValueError, match="rank 0"):
            _ = results[0].windows


@run_ranks(2)
def test_a_failure_is_raised_on_all_ranks_and_the_next_call_works(config, of_recipe, tmp_path):
    own = {**OPTIONS, "output_dir": str(tmp_path)}
    with pytest.raises(InputError, match="did you mean 'batch_size'"):
        evaluate(config, overrides={**own, "batchsize": 3})
    # Only one rank is wrong; the other must not wait for it.
    wrong = {"max_windows": 8} if dist.get_rank() else {}
    with pytest.raises(InputError, match=r"max_windows differs between ranks: 9 on .*; 8 on"):
        evaluate(config, overrides={**own, **wrong})
    if dist.get_rank():
        from ppl_eval.run import forward

        def fail(*_):
            raise RuntimeError("this rank cannot go on")

        kept, forward.score_batch = forward.score_batch, fail
    with pytest.raises(EvaluationError, match=r"rank 1 on .*while scoring window .*this rank cannot go on"):
        evaluate(config, overrides=own)
    if dist.get_rank():
        forward.score_batch = kept
    assert evaluate(config, overrides=own)["nll_sum_hex"] == of_recipe["nll_sum_hex"]


def test_messages_are_those_of_the_recipe(config, tiny):
    for overrides, message in (
        (["batch_size"], "key=value"),
        ({"model.num_layers": 3}, r"num_hidden_layers|num_layers"),
        ({"protocol.max_seq_len": [32, 64]}, "one result"),
        ({"part": "1/2"}, "one result"),
        ({"dtype": "???"}, r"\?\?\?"),
        ({"batch_size": "4"}, "batch_size is '4'"),
        ("batch_size=4", "mapping"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(config, overrides=overrides)
    assert not dist.is_initialized()


def test_launched_without_a_group_it_says_what_to_call(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="init_process_group"):
        evaluate(config)


def test_a_mapping_is_a_config_and_nothing_is_left_behind(config, of_recipe, tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = OmegaConf.to_container(OmegaConf.load(config))
    del given["output_dir"]
    result = evaluate(given, overrides=[f"{key}={value}" for key, value in OPTIONS.items()])
    assert result["nll_sum_hex"] == of_recipe["nll_sum_hex"]
    assert result.windows.num_rows == 9
    assert "output_dir" not in given
    assert not list(tmp_path.glob("ppl_eval-*"))


def test_a_result_is_saved_and_tabulated(config, tmp_path):
    result = evaluate(config, overrides={**OPTIONS, "output_dir": tmp_path / "out"})
    path = result.save(tmp_path / "kept")
    assert json.loads(path.read_text()) == result.content
    assert sorted(file.name for file in path.parent.iterdir()) == ["result.json", "windows.parquet"]
    row = result.to_pandas()
    assert row["nll_sum_hex"].tolist() == [result["nll_sum_hex"]]
    assert row["protocol.max_seq_len"].tolist() == [32]
    assert Result({**result.content, "perplexity": "Infinity"}).perplexity == float("inf")


def test_importing_is_cheap():
    code = "import sys, ppl_eval; assert 'evaluate' in dir(ppl_eval); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "torchtune", "omegaconf", "pyarrow"} & set(out.split())


@pytest.mark.parametrize("computed_before", [True, False])
def test_a_result_says_when_mkl_was_in_use_before(computed_before):
    code = [
        "import torch; torch.ones(64, 64) @ torch.ones(64, 64)",
        "import ppl_eval",
        "import torch; torch.ones(64, 64) @ torch.ones(64, 64)",
        "from ppl_eval.config import environment",
        "print(environment.mkl_keeps_bits(), *environment.kernel_notes())",
    ]
    env = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
    lines = "\n".join(code[0 if computed_before else 1 :])
    run = subprocess.run([sys.executable, "-c", lines], env=env, capture_output=True, text=True, check=True)
    if run.stdout.startswith("None"):
        pytest.skip("this torch has no MKL")
    assert ("import ppl_eval first" in run.stdout) == computed_before
