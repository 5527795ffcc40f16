"""Run the recipe, with rank ODD (default 1) odd in the way that the first argument says."""

import os
import sys
from types import SimpleNamespace

import distributed_ppl_eval
from distributed_ppl_eval import DistributedPPLEvalRecipe
from ppl_eval.distributed import process_group, rendezvous


def fail(_):
    raise (ValueError if odd == "fails" else RuntimeError)("injected on rank 1")


odd, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]

if os.environ["RANK"] == os.environ.get("ODD", "1"):
    if odd in ("fails", "crashes"):
        DistributedPPLEvalRecipe.evaluate = fail
    elif odd == "absent":
        sys.exit()
    elif odd == "torch_version":
        rendezvous.torch = SimpleNamespace(__version__="1.0.0")
    elif odd == "backend":
        process_group.choose_backend = lambda *_: "nccl"

distributed_ppl_eval.main()
