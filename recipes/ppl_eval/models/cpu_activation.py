"""SiLU and GELU on a CPU with the same bits for any number of threads and for any batch.

torch divides a tensor among threads into parts of equal length and takes the last few numbers of each part,
fewer than two vectors, one by one, with another exponential function, which differs in the last bit. Which
numbers these are depends on the number of threads and on all that is in the tensor. Here parts end at whole
vectors, so that there are no such numbers.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

# Not fewer than two vectors of any dtype on any CPU.
_UNIT = 128
# So few numbers stay on one thread.
_SERIAL = 16_384
# SiLU gives a thread no fewer: at::internal::GRAIN_SIZE. GELU (ATen/native/cpu/Activation.cpp) divides any
# that are more than `_SERIAL` among all threads.
_SILU_GRAIN = 32_768


class WholeVectors(nn.Module):
    """Stand-in for ``nn.SiLU`` or ``nn.GELU``, without gradients.

    Args:
        activation: what it computes.
    """

    def __init__(self, activation: nn.SiLU | nn.GELU) -> None:
        super().__init__()
        self.approximate = None if isinstance(activation, nn.SiLU) else activation.approximate

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to every number of a tensor of any shape."""
        flat_N = x.reshape(-1)
        out_N = torch.empty_like(flat_N)
        shared = _shared(len(flat_N), silu=self.approximate is None)
        vectors = len(flat_N) - len(flat_N) % _UNIT
        for begin, end in pairwise((0, *range(shared, vectors, _SERIAL), vectors)):
            self._write(flat_N[begin:end], out_N[begin:end])
        rest = len(flat_N) - vectors
        if rest:
            padded, padded_out = flat_N.new_zeros(2, _UNIT)
            padded[:rest] = flat_N[vectors:]
            self._write(padded, padded_out)
            out_N[vectors:] = padded_out[:rest]
        return out_N.view(x.shape)

    def _write(self, x: Tensor, out: Tensor) -> None:
        if self.approximate is None:
            torch.ops.aten.silu.out(x, out=out)
        else:
            torch.ops.aten.gelu.out(x, approximate=self.approximate, out=out)


def _shared(numel: int, *, silu: bool) -> int:
    """Return how many of the first numbers torch divides among threads into parts of whole vectors."""
    threads = torch.get_num_threads()
    if threads == 1:
        return numel - numel % _UNIT
    if numel <= _SERIAL:
        return 0
    parts = min(threads, -(-numel // _SILU_GRAIN)) if silu else threads
    while True:
        shared = numel - numel % (parts * _UNIT)
        # What is left out may have been the last thread's.
        left = min(threads, -(-shared // _SILU_GRAIN)) if silu else parts
        if left == parts:
            return shared if shared > _SERIAL else 0
        parts = left


def install(model: nn.Module) -> None:
    """Replace SiLU and GELU in all modules of a model."""
    made: dict[nn.Module, WholeVectors] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.SiLU | nn.GELU):
                setattr(module, name, made.setdefault(child, WholeVectors(child)))
