"""What a run depends on besides its inputs: device, dtype, seed, versions."""

import ctypes
import hashlib
import os
import platform
import resource
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torchtune.training import get_dtype
from torchtune.utils import get_device

_PACKAGES = (
    *("torch", "torchtune", "torchao", "tokenizers", "transformers", "datasets", "lm_eval", "numpy"),
    *("pyarrow", "distributed_ppl_eval"),
)
# Variables by which libraries choose kernels or their arithmetic.
_KERNEL_VARIABLES = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
)
_SIMD = ("avx", "amx", "fma", "f16c", "sve", "neon", "bf16")


def choose_device(device: str | None, backend: str | None) -> torch.device:
    """Return this rank's device, from LOCAL_RANK where there are several.

    None is cuda where torch finds one, else the CPU.

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
    if device is not None and found.type != torch.device(device).type:
        raise ValueError(f"device is {device!r}, but torch finds none on this machine; use device=cpu")
    return found


def choose_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
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
    """Return versions of what the numbers depend on.

    ``cpu`` is the instruction set of torch's kernels, and ``source`` a hash of this project's modules.
    """
    return {
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **{package: _version(package) for package in _PACKAGES},
        "source": _source_hash(),
    }


def kernel_facts(device: torch.device) -> dict[str, Any]:
    """Return what decides which kernels a device runs, and how they round; JSON values.

    The number of threads is not among them: MKL is held to the same bits for any (``ppl_eval``).
    """
    facts: dict[str, Any] = {
        "variables": {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ},
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        return facts | {
            "device": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        }
    cpu = torch.cpu.get_capabilities()
    return facts | {
        # MKL has other kernels for other makers' processors with the same instructions.
        "maker": str(cpu.get("cpu_name", "")).split(" ")[0],
        "instructions": sorted(name for name, has in cpu.items() if has is True and name.startswith(_SIMD)),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": "openmp" if torch.backends.openmp.is_available() else "native",
        "mkl": torch.backends.mkl.is_available(),
        "mkl_same_bits": mkl_keeps_bits(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
    }


def mkl_keeps_bits() -> bool | None:
    """Return whether MKL gives the same bits for any number of threads; None where it cannot be asked.

    ``ppl_eval`` sets this mode by a variable that MKL reads at its first product: too late in a program that
    has computed before.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not torch.backends.mkl.is_available() or not library.is_file():
        return None
    ask = getattr(ctypes.CDLL(str(library)), "mkl_serv_cbwr_get", None)
    # MKL_CBWR_ALL asks for branch and flags; MKL_CBWR_STRICT is 0x10000.
    return None if ask is None else bool(ask(-1) & 0x10000)


def kernel_notes() -> list[str]:
    """Return what a reader of the result must know about the kernels: at most one line."""
    if mkl_keeps_bits() is not False:
        return []
    return [
        "MKL was in use before ppl_eval was imported: the last bits may depend on the number of threads and"
        " differ from a run of the recipe; import ppl_eval first, or set MKL_CBWR=AUTO,STRICT"
    ]


@cache
def _source_hash() -> str:
    """Hash (sha256) all modules of this package, by their paths in it."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(
            f"{path.relative_to(package)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
