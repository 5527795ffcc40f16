"""A model that is in memory already, lent by the program that trains it, and given back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune.modules import TransformerDecoder

COMPONENT = f"{__name__}.in_memory"
_lent: ContextVar[TransformerDecoder | None] = ContextVar("lent", default=None)
# FSDP exchanges the parameters themselves, and nothing else does.
_KEPT_BY_OTHERS = ("_parameters", "_buffers")
# Not replaced but changed in place: others may hold them.
_IN_PLACE = ("_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def in_memory() -> TransformerDecoder:
    """Return the model that ``evaluate(model=...)`` was given.

    Raises:
        ValueError: in any other run.
    """
    model = _lent.get()
    if model is None:
        raise ValueError(
            f"{COMPONENT} stands for the model that evaluate(model=...) is given, and there is none"
        )
    return model


def is_lent() -> bool:
    """Return whether this run scores a model that is in memory already."""
    return _lent.get() is not None


@contextmanager
def lent(model: TransformerDecoder) -> Iterator[None]:
    """Score this model inside; restore its modules, attributes, hooks and modes on every way out.

    Parameters and ``requires_grad`` are not touched by scoring.
    """
    before = {module: _Kept(module) for module in model.modules()}
    # torchtune's tied head is no module.
    head = None if isinstance(model.output, nn.Module) else dict(vars(model.output))
    token = _lent.set(model)
    model.eval()
    try:
        yield
    finally:
        _lent.reset(token)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for module, kept in before.items():
            kept.restore(module)
        if head is not None:
            vars(model.output).update(head)


class _Kept:
    """What a module is besides its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.kind, self.attributes = type(module), dict(vars(module))
        self.contents = {name: dict(vars(module)[name]) for name in _IN_PLACE}

    def restore(self, module: nn.Module) -> None:
        """Make the module what it was."""
        module.__class__ = self.kind
        now = vars(module)
        for name in [name for name in now if name not in self.attributes]:
            del now[name]
        now.update({name: value for name, value in self.attributes.items() if name not in _KEPT_BY_OTHERS})
        for name, content in self.contents.items():
            now[name].clear()
            now[name].update(content)
