"""What a run depends on besides its inputs: device, dtype, seed, versions."""

import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import distributed as dist
from torchtune.training import get_dtype
from torchtune.utils import get_device

_PACKAGES = ("torch", "torchtune", "torchao", "tokenizers", "numpy", "lm_eval", "distributed_ppl_eval")


def choose_device(device: str, backend: str | None) -> torch.device:
    """Return this rank's device, from LOCAL_RANK where there are several.

    Raises:
        ValueError: if this machine does not have it, or torch does not have the backend.
    """
    if backend is not None and not dist.is_backend_available(backend):
        raise ValueError(
            f"backend is {backend!r}, which this torch does not have; leave it out, or use gloo or nccl"
        )
    try:
        found = get_device(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}: {error}") from error
    # torchtune falls back to the CPU without a word.
    if found.type != torch.device(device).type:
        raise ValueError(f"device is {device!r}, but torch finds none on this machine; use device=cpu")
    return found


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations.

    Raises:
        ValueError: if the device cannot compute in it.
    """
    try:
        return get_dtype(dtype, device)
    except RuntimeError as error:
        raise ValueError(f"dtype is {dtype!r}: {error}") from error


def choose_seed(seed: int, recipe_state: dict[str, Any] | None, seed_check: str) -> tuple[int, str | None]:
    """Settle between the config's seed and the one the checkpoint was trained with.

    Args:
        seed: the config's.
        recipe_state: what the training recipe saved, or None.
        seed_check: ``warn`` takes the checkpoint's and says so, as torchtune's recipes do; ``error`` refuses;
            ``ignore`` keeps the config's.

    Returns:
        The seed in force, and a note if the two differed.

    Raises:
        ValueError: if they differ under ``error``.
    """
    trained = (recipe_state or {}).get("seed")
    if trained is None or trained == seed:
        return seed, None
    if seed_check == "error":
        raise ValueError(
            f"seed is {seed}, but the checkpoint was trained with seed {trained}; use seed={trained}, or"
            " seed_check=warn or ignore"
        )
    if seed_check == "warn":
        return (
            int(trained),
            f"seed {trained} of the checkpoint is used instead of the config's {seed} (seed_check=warn)",
        )
    return (
        seed,
        f"seed {seed} of the config is kept; the checkpoint was trained with {trained} (seed_check=ignore)",
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the device for cuda, resident for cpu."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str | None]:
    """Return versions of what the numbers depend on; ``cpu`` is the instruction set of torch's kernels."""
    return {
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **{package: _version(package) for package in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
