"""Under torchrun: run the recipe once for every argument list of a JSON file, in the same processes.

An argument list may start with "reversed": then this rank runs its batches from the last to the first.
NODE_OF_RANK="0,0,1" makes the ranks believe that they are on these nodes.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import distributed_ppl_eval
from ppl_eval.run import loop

forward = loop.batches_of
connect = distributed_ppl_eval.connect

for number, argv in enumerate(json.loads(Path(sys.argv[1]).read_text())):

    def connect_apart(timeout_seconds, prefix=f"run{number}"):
        # Every run must find the store empty, as a process of its own would.
        world = connect(timeout_seconds)
        changes = {"store": dist.PrefixStore(prefix, world.store)}
        if "NODE_OF_RANK" in os.environ:
            nodes = os.environ["NODE_OF_RANK"].split(",")
            node = nodes[world.rank]
            changes |= {"node": node, "local_rank": nodes[: world.rank].count(node)}
        return dataclasses.replace(world, **changes)

    distributed_ppl_eval.connect = connect_apart
    loop.batches_of = forward
    if argv[0] == "reversed":
        argv = argv[1:]
        loop.batches_of = lambda *args, **kwargs: forward(*args, **kwargs)[::-1]
    code = distributed_ppl_eval.run(argv)
    if code:
        sys.exit(code)
