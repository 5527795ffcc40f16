"""Run the recipe, with rank ODD (default 1) odd in the way that the first argument says."""

import os
import sys
import threading
from pathlib import Path

import distributed_ppl_eval
from distributed_ppl_eval import DistributedPPLEvalRecipe

odd, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]

if os.environ["RANK"] == os.environ.get("ODD", "1"):
    if odd in ("fails", "crashes"):

        def fail(self):
            if "FAILED_AT" in os.environ:
                Path(os.environ["FAILED_AT"]).touch()
            raise (ValueError if odd == "fails" else RuntimeError)("injected on rank 1")

        DistributedPPLEvalRecipe.evaluate = fail
    elif odd == "absent":
        threading.Event().wait()

distributed_ppl_eval.main()
