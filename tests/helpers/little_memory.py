"""Run the recipe with little memory to score in: before the first batch, the address space of the process is
limited to what it has and LITTLE_MIB more, so that torch's allocator fails for real."""

import os
import resource
from pathlib import Path

import distributed_ppl_eval
from ppl_eval.run import loop

score = loop.score


def score_in_little_memory(*args):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(float(os.environ["LITTLE_MIB"]) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        return score(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


loop.score = score_in_little_memory
if __name__ == "__main__":
    distributed_ppl_eval.main()
