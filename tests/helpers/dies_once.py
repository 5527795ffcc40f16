"""Run the recipe; rank KILL_RANK kills itself (SIGKILL) when it has recorded KILL_AFTER batches, in the first
of the runs that share the file KILLED. The schedule is static, so that every rank has so many."""

import os
import signal
import sys
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.results.ledger import Ledger

append = Ledger.append
batches_left = int(os.environ["KILL_AFTER"])


def append_and_die(self, records):
    global batches_left
    append(self, records)
    batches_left -= 1
    killed = Path(os.environ["KILLED"])
    if batches_left == 0 and os.environ["KILL_RANK"] == os.environ.get("RANK", "0") and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


Ledger.append = append_and_die

if __name__ == "__main__":
    sys.argv.append("schedule=static")
    distributed_ppl_eval.main()
