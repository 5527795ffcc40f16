"""Where NaN and infinity enter a model: the first module whose output is not finite.

Forward hooks see every module of whichever engine, in the order in which modules are done. A module is done
after those inside it, so the first with a bad output has good ones inside: the fault is in its own
arithmetic, in its weights, or in what it was given.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppl_eval.models.decoder import Decoder


@dataclass
class Watched:
    """What the hooks saw.

    Attributes:
        num_done: modules that were done before the first with a bad output, or all of them.
        text: describes that module; "" if every output was finite.
        row: of the batch, where that output is not finite first; None if its form does not tell.
        column: position in the row, likewise.
    """

    num_done: int = 0
    text: str = ""
    row: int | None = None
    column: int | None = None


@contextmanager
def watching(decoder: Decoder, batch_shape: tuple[int, int]) -> Iterator[Watched]:
    """Look at every output of the decoder's modules in forwards of this thread, up to the first bad one.

    Args:
        decoder: of any engine.
        batch_shape: rows and columns of the batch.
    """
    watched, thread = Watched(), threading.get_ident()

    def look(name: str, module: nn.Module, given: Any, output: Any) -> None:
        # Two batches may run through the modules at once.
        if watched.text or threading.get_ident() != thread:
            return
        bad = next((tensor for tensor in _tensors(output) if not _is_finite(tensor)), None)
        if bad is None:
            watched.num_done += 1
            return
        watched.text = f"{name or 'the model'} ({type(module).__name__}): {_cause(module, given)}"
        watched.row, watched.column = _place(bad, batch_shape)

    handles = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, name=name: look(name, module, (args, kwargs), output),
            with_kwargs=True,
            # Before those of FSDP, which take the weights away.
            prepend=True,
        )
        for name, module in decoder.module.named_modules()
    ]
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.is_floating_point():
            yield local
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _cause(module: nn.Module, given: Any) -> str:
    for name, parameter in module.named_parameters(recurse=False):
        for values in _tensors(parameter.detach()):
            num_bad = int((~torch.isfinite(values)).sum())
            if num_bad:
                return f"its {name} holds {num_bad:,} values that are not finite"
    if all(map(_is_finite, _tensors(given))):
        return "what it was given and its weights are finite, so a value grew too large in it"
    return "what it was given is not finite already, which comes of a sum or product between modules"


def _place(output: Tensor, batch_shape: tuple[int, int]) -> tuple[int | None, int | None]:
    """Return row and column of the first bad position, if the output has the form [B, T, ...]."""
    if tuple(output.shape[:2]) != batch_shape:
        return None, None
    bad_BT = ~torch.isfinite(output).flatten(2).all(dim=2) if output.dim() > 2 else ~torch.isfinite(output)
    row, column = torch.nonzero(bad_BT)[0].tolist()
    return row, column
