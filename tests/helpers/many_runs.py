"""In every rank: run the recipe once for every argument list of a JSON file, in the same processes.

An argument list may start with "reversed": then this rank runs its share of a static schedule from the last
batch to the first.
"""

import json
import sys
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.distributed.outcome import Stop
from ppl_eval.run import schedule

forward = schedule.batches_of

for argv in json.loads(Path(sys.argv[1]).read_text()):
    schedule.batches_of = forward
    if argv[0] == "reversed":
        argv = [*argv[1:], "schedule=static"]
        schedule.batches_of = lambda *args, **kwargs: forward(*args, **kwargs)[::-1]
    try:
        code = distributed_ppl_eval.run(argv)
    except Stop as stop:
        code = stop.code
    if code:
        sys.exit(code)
