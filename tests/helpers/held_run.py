"""Run the recipe and hold every rank in the middle: after HOLD_AFTER batches it touches <HELD>.<rank> and
waits until the file GO is there; rank STUCK then reads from a pipe that nobody writes to."""

import os
import time
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.results.ledger import Ledger

append = Ledger.append
batches_left = int(os.environ["HOLD_AFTER"])


def append_and_hold(self, records):
    global batches_left
    append(self, records)
    batches_left -= 1
    if batches_left == 0:
        Path(f"{os.environ['HELD']}.{os.environ.get('RANK', '0')}").touch()
        while not Path(os.environ["GO"]).exists():
            time.sleep(0.05)
        if os.environ.get("STUCK") == os.environ.get("RANK", "0"):
            os.read(os.pipe()[0], 1)


Ledger.append = append_and_hold
distributed_ppl_eval.main()
