"""The model of docs/scaling.md against hand numbers and its own table, and the plan on 1,024 ranks."""

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest

from ppl_eval.protocols import disjoint
from ppl_eval.protocols.plan import make_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hand_numbers(scaling):
    constants = scaling.Constants(per_step=0.5, per_report=0.25)
    job = scaling.Job(num_tokens=3200, tokens_per_second=10, tokens_per_batch=10, load_seconds=7, jitter=0.5)
    found = scaling.predict(constants, job, 8)
    assert found["compute"] == 40
    assert found["reduce"] == 0.5 * 3 + 8 * 0.25 * 8
    assert found["load"] == 7
    assert found["straggler"] == pytest.approx(1 + 40 * 0.5 / math.sqrt(40) * math.sqrt(2 * math.log(8)))


def test_table_of_the_docs_is_the_model_and_reduction_stays_below_one_percent(scaling):
    constants = scaling.Constants(per_step=0.0088, per_report=0.00019)
    job = scaling.Job(
        num_tokens=1e9, tokens_per_second=5e3, tokens_per_batch=8192, load_seconds=60, jitter=0.05
    )
    rows = re.findall(
        r"^\| ([\d,]+) \|.* ([\d,]+) s \| ([\d.]+) % \|$", (ROOT / "docs/scaling.md").read_text(), re.M
    )
    assert [int(row[0].replace(",", "")) for row in rows] == list(scaling.WORLD_SIZES)
    for size, told, share in rows:
        parts = scaling.predict(constants, job, int(size.replace(",", "")))
        whole = sum(parts.values())
        assert whole == pytest.approx(float(told.replace(",", "")), rel=0.005)
        assert 100 * parts["reduce"] / whole == pytest.approx(float(share), rel=0.05, abs=0.001)
        assert parts["reduce"] / whole < 0.01


def test_plan_on_1024_ranks_scores_every_batch_once_in_flat_memory(scaling):
    plan = make_plan(disjoint(max_seq_len=16, join=None), np.arange(0, 200_000, 40), 3)
    few, many = (scaling.plan_on(size, plan) for size in (8, 1024))
    assert many["steps"] == -(-plan.num_batches // 1024)
    assert many["peak_kib"] < few["peak_kib"] + 256
