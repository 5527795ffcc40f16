"""Under torchrun: run the recipe once for every kind of mismatch, in the same processes; the last rank is the
odd one. Every rank prints how each run ended and after how many seconds."""

import os
import sys
import time
from types import SimpleNamespace

import distributed_ppl_eval
from distributed_ppl_eval import DistributedPPLEvalRecipe
from ppl_eval.distributed import process_group, rendezvous
from ppl_eval.distributed.process import Stop

ODD = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def torch_version():
    rendezvous.torch = SimpleNamespace(__version__="1.0.0")


def config():
    sys.argv.append("batch_size=3")


def seed():
    sys.argv.append("seed=43")


def backend():
    process_group.choose_backend = lambda *_: "nccl"


def checkpoint():
    load = DistributedPPLEvalRecipe.load_checkpoint

    def load_other(self):
        load(self)
        self.checkpoint.identity["model.safetensors"]["bytes"] += 1

    DistributedPPLEvalRecipe.load_checkpoint = load_other


def data():
    # A node of its own, on which the same path holds another text.
    os.environ.update(GROUP_RANK="1", LOCAL_RANK="0", TEXT=os.environ["OTHER_TEXT"])


KINDS = {kind.__name__: kind for kind in (torch_version, config, seed, backend, checkpoint, data)}

if __name__ == "__main__":
    originals = (
        list(sys.argv),
        rendezvous.torch,
        process_group.choose_backend,
        DistributedPPLEvalRecipe.load_checkpoint,
    )
    for number, (name, make_odd) in enumerate(KINDS.items()):
        sys.argv, rendezvous.torch, process_group.choose_backend, DistributedPPLEvalRecipe.load_checkpoint = (
            originals
        )
        sys.argv = list(sys.argv)
        # Keeps the runs apart in the store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        if ODD:
            make_odd()
        begin = time.monotonic()
        try:
            distributed_ppl_eval.run(sys.argv[1:])
            ended = "went on"
        except Stop as stop:
            ended = f"stopped with {stop.code}"
        print(f"{name}: rank {os.environ['RANK']} {ended} after {time.monotonic() - begin:.1f} s", flush=True)
