"""torchao's quantised weights: which tensor is one, how large it is, which device it is packed for."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Storage layouts whose kernels exist on one kind of device only; a layout that is not here runs anywhere.
LAYOUT_DEVICES = {
    "Int4CPULayout": "cpu",
    "Int8DynamicActInt4WeightCPULayout": "cpu",
    "TensorCoreTiledLayout": "cuda",
    "MarlinSparseLayout": "cuda",
    "MarlinQQQLayout": "cuda",
    "CutlassInt4PackedLayout": "cuda",
    "CutlassSemiSparseLayout": "cuda",
    "SemiSparseLayout": "cuda",
    "GemlitePackedLayout": "cuda",
    "Int4XPULayout": "xpu",
}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is of one of torchao's quantised classes (a sharded tensor is not)."""
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    return is_traceable_wrapper_subclass(inner) and not isinstance(inner, DTensor)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the ordinary tensors that a weight is made of: packed integers, scales, zero points; or
    itself.
    """
    inner = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if not is_traceable_wrapper_subclass(inner):
        yield inner
        return
    for name in inner.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(inner, name))


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights in memory, tied ones counted once."""
    return sum(t.numel() * t.element_size() for p in model.parameters() for t in plain_tensors(p))


def move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move a quantised tensor to a device, part by part.

    torchao's own ``.to`` refuses packed layouts even when their file was only read on the CPU on its way to
    the GPU.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.to(device)
    names, context = tensor.__tensor_flatten__()
    parts = {name: move(getattr(tensor, name), device) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def layout_names(tensor: torch.Tensor) -> set[str]:
    """Return the names of the storage layouts inside a quantised tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return set()
    layout = getattr(tensor, "_layout", None)
    inside = [layout_names(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    return set().union(*inside) | ({type(layout).__name__} if layout is not None else set())


def check_packed_for(weights: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
    """Refuse quantised weights whose packing another kind of device's kernels expect.

    Args:
        weights: by name; full-precision ones are passed over.
        device: where the model is to run.

    Raises:
        ValueError: if one is; names the layout, its device, and what to do.
    """
    kind = torch.device(device).type
    for name, tensor in weights.items():
        if not is_quantized(tensor):
            continue
        for layout in sorted(layout_names(tensor)):
            made_for = LAYOUT_DEVICES.get(layout, kind)
            if made_for != kind:
                raise ValueError(
                    f"the checkpoint was packed for {made_for} ({name} has the layout {layout}), the run is "
                    f"on {kind}: run "
                    f"with device={made_for}; or take the full-precision checkpoint and set `quantizer`, "
                    f"which packs for "
                    f"{kind} on load; or write one for {kind} with `ppl-eval quantize --config ... "
                    f"device={kind}`"
                )
