"""The fault matrix: whatever stops a run, and whenever, it says why in time and goes on to the same bits.

Real processes, real signals, moments drawn with the case's number as seed. A run that was stopped is started
again on other ranks; both together must have recorded every window once, and give the undisturbed run's bits.
"""

import json
import random
import re
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from helpers.runs import TORCHRUN, finish, many, ranks, result_of, run, running_ranks, the_error
from helpers.tiny import write_config

FAULTY_RUN = str(Path(__file__).parents[1] / "helpers" / "faulty_run.py")
HERE = socket.gethostname()
TIMEOUT_SECONDS = 6
GRACE_SECONDS = 15
NUM_WINDOWS, BATCH_SIZE = 37, 2
NUM_BATCHES = 19
KILL, STOP, TERM, HUP = "SIGKILL", "SIGSTOP", "SIGTERM", "SIGHUP"
DP: list[str] = []
FSDP = ["data_parallel_shard_dim=-1"]
HSDP = ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=2"]
SCORING, ENDING = "scoring", "ending"
LOADING, MEETING = "model", "first contact"


class Case(NamedTuple):
    """A fault.

    Attributes:
        signal: what a rank gets.
        num_ranks: of the run.
        overrides: how it divides the work.
        moment: ``SCORING`` (after a random number of batches), ``ENDING`` (after the last one), or a phase.
        then_ranks: of the run that goes on.
        then: how that one divides the work.
    """

    signal: str
    num_ranks: int
    overrides: list[str]
    moment: str
    then_ranks: int
    then: list[str]


QUICK = [
    Case(KILL, 2, DP, SCORING, 3, DP),
    Case(KILL, 3, DP, SCORING, 1, DP),
    Case(KILL, 2, FSDP, SCORING, 1, DP),
    Case(KILL, 2, DP, LOADING, 2, DP),
    Case(STOP, 2, DP, SCORING, 2, FSDP),
    Case(STOP, 2, FSDP, SCORING, 2, DP),
    Case(TERM, 1, DP, SCORING, 2, DP),
    Case(TERM, 3, DP, SCORING, 2, FSDP),
    Case(KILL, 1, DP, SCORING, 2, DP),
    Case(KILL, 2, DP, MEETING, 1, DP),
    Case(TERM, 2, DP, ENDING, 2, DP),
    Case(HUP, 2, DP, SCORING, 3, DP),
]
SLOW = [
    Case(KILL, 2, DP, ENDING, 3, DP),
    Case(KILL, 2, FSDP, LOADING, 2, FSDP),
    Case(KILL, 3, FSDP, SCORING, 2, FSDP),
    Case(KILL, 3, DP, ENDING, 1, DP),
    Case(KILL, 4, HSDP, SCORING, 3, DP),
    Case(KILL, 4, DP, SCORING, 4, HSDP),
    Case(STOP, 2, DP, LOADING, 1, DP),
    Case(STOP, 2, DP, ENDING, 1, DP),
    Case(STOP, 3, DP, SCORING, 1, DP),
    Case(STOP, 3, FSDP, SCORING, 2, DP),
    Case(STOP, 2, FSDP, LOADING, 2, FSDP),
    Case(STOP, 4, HSDP, SCORING, 2, DP),
    Case(TERM, 1, DP, LOADING, 1, DP),
    Case(TERM, 2, DP, MEETING, 2, DP),
    Case(TERM, 2, FSDP, SCORING, 1, DP),
    Case(TERM, 4, HSDP, SCORING, 2, FSDP),
    Case(HUP, 1, DP, SCORING, 1, DP),
    Case(HUP, 2, FSDP, LOADING, 1, DP),
]
# (ranks, who dies with it, restarts): under torchrun, whose launcher may be what dies.
LAUNCHED = [
    (2, "launcher", 0),
    (2, "both", 0),
    (3, "launcher", 0),
    (3, "both", 0),
    (2, "rank", 0),
    (3, "rank", 0),
    (2, "rank", 1),
    (3, "rank", 2),
    (1, "both", 0),
    (1, "rank", 1),
]


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    keys = {"max_windows": NUM_WINDOWS, "batch_size": BATCH_SIZE, "timeout_seconds": TIMEOUT_SECONDS}
    folder = tmp_path_factory.mktemp("config")
    return write_config(folder / "config.yaml", tiny.folder, tiny.text, **keys)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """``nll_sum_hex`` of an undisturbed run."""
    folder = tmp_path_factory.mktemp("alone")
    finished = many(1, [["--config", str(config), f"output_dir={folder}"]], folder)
    assert finished.code == 0, finished.output
    return result_of(folder)["nll_sum_hex"]


@pytest.fixture
def argv(config, tmp_path, private_home):
    return [FAULTY_RUN, "--config", str(config), f"output_dir={tmp_path / 'out'}"]


def draw(case, number):
    """The fault of a case: a rank and a moment, drawn by its number."""
    dice = random.Random(number)
    fault = {"rank": dice.randrange(case.num_ranks), "signal": case.signal}
    batches_each = NUM_BATCHES // case.num_ranks
    if case.moment == SCORING:
        return {**fault, "batches": dice.randrange(1, batches_each)}
    return {**fault, "phase": {ENDING: "scored"}.get(case.moment, case.moment)}


def error_of(case, fault):
    """What the last line must say."""
    rank = f"rank {fault['rank']} on {HERE}"
    doing = r"\(phase '[\w ]+', (no window finished|last finished window \d+)\)"
    if case.signal == KILL:
        return f"{rank} is gone without a word {doing}: it was killed"
    if case.signal == STOP:
        return rf"{rank} does not answer: no sign of life for \d+ s {doing}"
    kept = "; finished windows are recorded" if case.moment in (SCORING, ENDING) else ""
    return f"{rank} was stopped by {case.signal} {doing}{kept}; the same command starts it again"


def code_of(case):
    return {TERM: 128 + signal.SIGTERM, HUP: 128 + signal.SIGHUP}.get(case.signal)


def scored(tmp_path):
    """How often each window was recorded."""
    path = tmp_path / "scored"
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


def assert_goes_on(case, argv, alone, tmp_path):
    before = scored(tmp_path)
    env = {"SCORED": str(tmp_path / "scored")}
    finished = ranks([[*argv, *case.then]] * case.then_ranks, tmp_path, [env] * case.then_ranks)
    assert finished.code == 0, finished.output
    result = result_of(tmp_path / "out")
    assert result["nll_sum_hex"] == alone
    assert result["coverage"]["scored_tokens"] == result["coverage"]["expected_tokens"]
    after = scored(tmp_path)
    assert set(after) == set(range(NUM_WINDOWS))
    twice = sum(count - 1 for count in after.values())
    assert twice <= BATCH_SIZE * case.num_ranks, "more than one batch a rank was scored again"
    assert result["plan"]["resumed_batches"] >= (len(before) - twice) // BATCH_SIZE - case.num_ranks


@pytest.mark.parametrize(
    ("number", "case"),
    [
        *((number, case) for number, case in enumerate(QUICK)),
        *(pytest.param(len(QUICK) + n, case, marks=pytest.mark.slow) for n, case in enumerate(SLOW)),
    ],
    ids=lambda value: (
        f"{value.signal}-{value.num_ranks}-{value.moment}" if isinstance(value, Case) else str(value)
    ),
)
def test_a_signal_ends_the_run_in_time_and_the_next_goes_on(number, case, argv, alone, tmp_path):
    fault = draw(case, number)
    env = {
        "FAULT": json.dumps({**fault, "once": str(tmp_path / "once")}),
        "SCORED": str(tmp_path / "scored"),
    }
    job = [[*argv, *case.overrides]] * case.num_ranks
    with running_ranks(job, tmp_path, [env] * case.num_ranks) as (running, _):
        # Loading and compiling come first; from the fault on there are timeout_seconds and the grace.
        wait_until_struck(tmp_path / "once", running)
        finished = finish(running, TIMEOUT_SECONDS + GRACE_SECONDS)
    assert all(finished.codes), finished.output
    if case.num_ranks > 1 or case.signal != KILL:
        error = the_error(finished)
        assert re.match(error_of(case, fault), error), error
    if code_of(case):
        assert set(finished.codes) == {code_of(case)}, finished.output
    assert_goes_on(case, argv, alone, tmp_path)


def wait_until_struck(once, running):
    give_up = time.monotonic() + 120
    while not once.exists():
        assert time.monotonic() < give_up, running[0].output()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "launched"), list(enumerate(LAUNCHED)), ids=str)
def test_under_torchrun(number, launched, argv, alone, tmp_path):
    """SIGKILL of a rank, of the launcher, or of both; restarts where torchrun makes them."""
    num_ranks, whom, restarts = launched
    case = Case(KILL, num_ranks, DP, SCORING, 1 + number % 3, DP)
    fault = {**draw(case, 100 + number), "whom": whom, "once": str(tmp_path / "once")}
    env = {"FAULT": json.dumps(fault), "SCORED": str(tmp_path / "scored")}
    options = ["--standalone", "--nproc_per_node", str(num_ranks), "--max_restarts", str(restarts)]
    done = run(TORCHRUN, *options, *argv, env=env, timeout=150)
    assert (tmp_path / "once").exists(), done.output
    if restarts:
        assert done.code == 0, done.output
        assert result_of(tmp_path / "out")["nll_sum_hex"] == alone
        assert set(scored(tmp_path)) == set(range(NUM_WINDOWS))
        return
    assert done.code, done.output
    if whom == "launcher":
        # It kept the store too: either may be missed first.
        assert re.search(
            rf"^error: .*(the launcher of {HERE}|rendezvous store at)", done.output, re.MULTILINE
        )
    wait_until_unlocked(tmp_path / "out")
    assert_goes_on(case, argv, alone, tmp_path)


def wait_until_unlocked(out):
    """Wait for ranks whose launcher is gone: they hold the lock until they are gone too."""
    FileLock(out / ".lock").acquire(timeout=60).lock.release()
