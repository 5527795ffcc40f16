"""lm-eval's tasks with our log-likelihoods: the values of its Hugging Face model, the same bits on any ranks,
and a context that several requests share runs once."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from helpers.local_tasks import write_tasks
from helpers.runs import ranks
from helpers.tiny import write_config

TASKS = ("local_choose", "local_cloze", "local_rolling")
MANY_TASKS = str(Path(__file__).parents[1] / "helpers" / "many_tasks.py")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Tasks and a config."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder / "tasks")
    write_config(folder / "config.yaml", tiny.folder, tiny.text, batch_size=3)
    return folder


@pytest.fixture(scope="module")
def theirs(tiny, folder):
    """Results of lm-eval's own model."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.folder)
    harness = HFLM(pretrained=tiny.twin, tokenizer=tokenizer, batch_size=1, max_length=128)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = simple_evaluate(harness, tasks=list(TASKS), task_manager=manager, bootstrap_iters=10)
    return {task: numbers(found["results"][task]) for task in TASKS}


def numbers(result):
    return {
        name: value for name, value in result.items() if isinstance(value, float) and "stderr" not in name
    }


def command(folder, out, *more):
    return [
        *("tasks", "--config", str(folder / "config.yaml"), "--tasks", ",".join(TASKS)),
        *("--include_path", str(folder / "tasks")),
        *(f"output_dir={out}", "max_seq_length=128", *more),
    ]


def run_all(folder, num_ranks, commands):
    """Run commands one after the other in the same ranks."""
    jobs = folder / f"jobs{num_ranks}.json"
    jobs.write_text(json.dumps(commands))
    return ranks([[MANY_TASKS, str(jobs)]] * num_ranks, folder)


def results_of(out):
    found = json.loads((out / "results.json").read_text())
    return {task: found["results"][task] for task in TASKS}


@pytest.fixture(scope="module")
def alone(tiny, folder):
    """One process: a config of ours, then torchtune's own form, which must do the same."""
    own = yaml.safe_load((folder / "config.yaml").read_text())
    text = {
        "output_dir": str(folder / "eleuther"),
        **{key: own[key] for key in ("model", "tokenizer", "checkpointer")},
        "device": "cpu",
        "dtype": "fp32",
        "seed": 1234,
        "batch_size": 3,
        "quantizer": None,
        "tasks": list(TASKS),
        "limit": None,
        "max_seq_length": 128,
        "enable_kv_cache": True,
        "include_path": str(folder / "tasks"),
    }
    (folder / "eleuther.yaml").write_text(yaml.safe_dump(text))
    commands = [command(folder, folder / "alone"), ["tasks", "--config", str(folder / "eleuther.yaml")]]
    finished = run_all(folder, 1, commands)
    assert "codes [0, 0] of rank 0" in finished.output, finished.output
    return finished, results_of(folder / "alone")


@pytest.fixture(scope="module")
def on_two(folder):
    """Two ranks: copies, FSDP, tensor parallelism, and a task that generates."""
    keys = {"copies": [], "fsdp": ["data_parallel_shard_dim=-1"], "tp": ["tensor_parallel_dim=2"]}
    commands = [command(folder, folder / name, *more) for name, more in keys.items()]
    generates = command(folder, folder / "generates")
    generates[generates.index("--tasks") + 1] = "local_cloze,local_generates"
    return run_all(folder, 2, [*commands, generates])


def test_values_are_those_of_lm_evals_own_model(alone, theirs):
    finished, ours = alone
    assert "|local_choose" in finished.output
    for task in TASKS:
        found = numbers(ours[task])
        assert set(found) == set(theirs[task])
        assert len(found) >= 2
        for name, value in found.items():
            # Shares of right answers are equal; exponentials of sums to rounding.
            rel = 0 if name.startswith("acc") else 1e-5
            assert value == pytest.approx(theirs[task][name], rel=rel, abs=0), (task, name)
    assert 0 < ours["local_choose"]["acc,none"] < 1


def test_torchtunes_own_evaluation_config_is_read_as_it_is(folder, alone):
    assert results_of(folder / "eleuther") == alone[1]


def test_two_ranks_give_the_same_bits_and_divided_models_the_same_values(folder, alone, on_two):
    for name in ("copies", "fsdp"):
        assert results_of(folder / name) == alone[1], on_two.output
    split = results_of(folder / "tp")
    for task in TASKS:
        assert numbers(split[task]) == pytest.approx(numbers(alone[1][task]), rel=1e-5)
    about = json.loads((folder / "copies" / "results.json").read_text())["config"]
    assert about["world_size"] == 2
    assert len(about["weights_hash"]) == 32


def test_a_task_that_generates_is_refused_by_name_on_all_ranks(on_two):
    for rank in (0, 1):
        assert f"codes [0, 0, 0, 2] of rank {rank}" in on_two.output
    assert "'local_generates' is of the kind generate_until" in on_two.output


def test_three_ranks_give_the_same_bits(folder, alone):
    finished = run_all(folder, 3, [command(folder, folder / "three")])
    assert "codes [0] of rank 2" in finished.output, finished.output
    assert results_of(folder / "three") == alone[1]


@pytest.mark.slow
def test_a_task_that_is_not_there_is_named(folder):
    """Slow: lm-eval reads all of its own tasks first."""
    missing = command(folder, folder / "none")
    missing[missing.index("--tasks") + 1] = "local_none"
    finished = run_all(folder, 1, [missing])
    assert "knows no task 'local_none'" in finished.output
    assert "codes [2]" in finished.output


def test_a_shared_context_runs_once_with_the_values_of_its_own_rows(tiny):
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3_2 import llama3_2

    from helpers.tiny import SHAPE
    from ppl_eval.models.engines import scorable
    from ppl_eval.scoring.nll import ScoringModel
    from ppl_eval.tasks.model import TaskModel

    decoder = llama3_2(**SHAPE).eval()
    weights = hf_to_tune(tiny.twin.state_dict(), num_heads=4, num_kv_heads=2, dim=64)
    decoder.load_state_dict(weights, strict=False)
    model = scorable(decoder)
    model.prepare(torch.device("cpu"))
    scorer = ScoringModel(model, 1 << 20)
    draw = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(2, 300, (count,), generator=draw).tolist()

    requests = []
    for length in (90, 60, 61):
        context = tokens(length)
        requests += [(None, context, tokens(count)) for count in (3, 1, 7, 4)]
    found, run = {}, {}
    for share in (True, False):
        lm = TaskModel(scorer, None, max_length=128, batch_size=2, share=share)
        found[share], run[share] = lm._loglikelihood_tokens(requests), lm.tokens_run
    assert run[False] > 3 * run[True]
    for (one, greedy_one), (other, greedy_other) in zip(found[True], found[False], strict=True):
        assert one == pytest.approx(other, rel=2e-6)
        assert greedy_one == greedy_other
