"""Run the recipe with a rank that is slow (SLOW, default 1): it scores every batch SLOWER times, or, with
WAIT_FOR, holds its first batch until a file of that name beside its ledger has grown to WAIT_BYTES."""

import os
import time
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.results.ledger import Ledger
from ppl_eval.run import forward

score_batch, append = forward.score_batch, Ledger.append


def score_again_and_again(*args):
    for _ in range(int(os.environ.get("SLOWER", "1")) - 1):
        score_batch(*args)
    return score_batch(*args)


def append_after_the_other(self, records):
    path = self.folder / Path(os.environ["WAIT_FOR"])
    while not path.exists() or path.stat().st_size < int(os.environ["WAIT_BYTES"]):
        time.sleep(0.02)
    append(self, records)


if os.environ.get("RANK") == os.environ.get("SLOW", "1"):
    forward.score_batch = score_again_and_again
    if "WAIT_FOR" in os.environ:
        Ledger.append = append_after_the_other

distributed_ppl_eval.main()
