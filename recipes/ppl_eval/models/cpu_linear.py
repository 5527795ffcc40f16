"""float32 products on x86 CPUs by oneDNN: a row has the same bits however many rows and threads there are.

torch has MKL multiply float32 matrices. MKL takes other kernels for few rows, and divides rows among threads
first, so that the bits of a short window depend on what it is batched with and on the number of threads; on
processors of other makers than Intel it is up to 2.2 times slower as well. In bfloat16 torch calls oneDNN
itself.
"""

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules.tied_linear import TiedLinear

# oneDNN has another kernel for one row.
_FEWEST_ROWS = 2


def is_available() -> bool:
    """Return whether this torch has oneDNN's float32 products, for x86."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias.

    Args:
        x: any shape that ends with I inputs.
        weight: [O, I].
        bias: [O], or None.

    Returns:
        x's shape, with O in place of I.
    """
    # Quantised, distributed and traced tensors have products of their own.
    plain = type(weight) in (Tensor, nn.Parameter) and type(x) is Tensor
    if not plain or x.dtype != torch.float32 or weight.device.type != "cpu" or not x.numel():
        return F.linear(x, weight, bias)
    rows_NI = x.reshape(-1, x.shape[-1])
    num_rows = len(rows_NI)
    if num_rows < _FEWEST_ROWS:
        rows_NI = F.pad(rows_NI, (0, 0, 0, _FEWEST_ROWS - num_rows))
    out_NO = torch.ops.mkldnn._linear_pointwise(rows_NI.contiguous(), weight, bias, "none", [], "")
    return out_NO[:num_rows].view(*x.shape[:-1], weight.shape[0])


class OneDNNLinear(nn.Linear):
    """``nn.Linear`` by ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply; [..., in_features] to [..., out_features]."""
        return linear(input, self.weight, self.bias)


class TiedProduct(nn.Module):
    """What torchtune's ``TiedLinear`` multiplies with, by ``linear``."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply with the weight of the module that the head is tied to."""
        return linear(x, weight)


def install(decoder: nn.Module) -> None:
    """Make a decoder's linear layers multiply by ``linear``, torchtune's tied head too."""
    if not is_available():
        return
    for module in decoder.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
    head = getattr(decoder, "output", None)
    if isinstance(head, TiedLinear):
        head.linear = TiedProduct()
