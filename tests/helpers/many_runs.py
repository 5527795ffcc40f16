"""Under torchrun: run the recipe once for every argument list of a JSON file, in the same processes.

An argument list may start with "reversed": then this rank runs its batches from the last to the first.
"""

import json
import os
import sys
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.sampler import ExactDistributedSampler

forward = ExactDistributedSampler.__iter__

for attempt, argv in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    # The store's keys are kept apart by the launcher's attempt number.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    ExactDistributedSampler.__iter__ = forward
    if argv[0] == "reversed":
        argv = argv[1:]
        ExactDistributedSampler.__iter__ = lambda self: reversed(list(forward(self)))
    code = distributed_ppl_eval.run(argv)
    if code:
        sys.exit(code)
