"""The caller's process, given back as it was."""

import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from ppl_eval.config.files import keep_to_owner
from ppl_eval.config.interpreter import quieten_libraries


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Restore, on every way out, what an evaluation changes in a process: random states, the current device,
    process groups that it formed, warning filters, the umask and the module search path."""
    # numpy's old generator: the one that set_seed seeds.
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    threads, path, groups = torch.get_num_threads(), [*sys.path], _groups()
    umask = os.umask(0o077)
    os.umask(umask)
    keep_to_owner()
    try:
        with warnings.catch_warnings():
            quieten_libraries()
            yield
    finally:
        os.umask(umask)
        sys.path[:] = path
        for group in _groups() - groups:
            dist.destroy_process_group(group)
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if cuda is not None and device is not None:
            torch.cuda.set_rng_state_all(cuda)
            torch.cuda.set_device(device)


def _groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)
