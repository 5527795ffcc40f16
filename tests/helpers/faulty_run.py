"""Run the recipe with one fault in it, and write down which windows were recorded.

FAULT is JSON: ``rank``, and its moment: ``phase`` (when it enters that) or ``batches`` (when it has recorded
so many); ``signal``; ``whom`` gets it: ``rank`` (itself), ``launcher`` or ``both``; ``once``, a file: runs
that find it have no fault. SCORED is a file for the windows. The schedule is static, so that every rank has
its batches.
"""

import json
import os
import signal
import sys
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.config import activity
from ppl_eval.results.ledger import Ledger

append, enter = Ledger.append, activity.enter
fault = json.loads(os.environ.get("FAULT", "{}"))
batches_left = fault.get("batches", 0)


def strike() -> None:
    if str(fault["rank"]) != os.environ.get("RANK", "0") or Path(fault["once"]).exists():
        return
    Path(fault["once"]).touch()
    number = signal.Signals[fault["signal"]]
    if fault.get("whom", "rank") != "rank":
        os.kill(os.getppid(), number)
    if fault.get("whom", "rank") != "launcher":
        os.kill(os.getpid(), number)
    # Work that nothing interrupts; the tiny run would be over before anybody looks.
    os.read(os.pipe()[0], 1)


def append_and_strike(self, records):
    global batches_left
    append(self, records)
    if "SCORED" in os.environ:
        with open(os.environ["SCORED"], "a") as file:
            file.write("".join(f"{window}\n" for window in records["window_id"].tolist()))
    batches_left -= 1
    if fault and batches_left == 0:
        strike()


def enter_and_strike(phase):
    enter(phase)
    if phase == fault.get("phase"):
        strike()


Ledger.append, activity.enter = append_and_strike, enter_and_strike

if __name__ == "__main__":
    sys.argv.append("schedule=static")
    distributed_ppl_eval.main()
