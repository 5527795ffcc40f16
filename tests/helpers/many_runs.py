"""In every rank: run the recipe once for every argument list of a JSON file, in the same processes.

An argument list may start with "reversed": then this rank runs its batches from the last to the first.
"""

import json
import os
import sys
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.protocols.sampler import ExactDistributedSampler

forward = ExactDistributedSampler.__iter__

for number, argv in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    # Every run must find the store empty, as a process of its own would.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
    ExactDistributedSampler.__iter__ = forward
    if argv[0] == "reversed":
        argv = argv[1:]
        ExactDistributedSampler.__iter__ = lambda self: reversed(list(forward(self)))
    code = distributed_ppl_eval.run(argv)
    if code:
        sys.exit(code)
