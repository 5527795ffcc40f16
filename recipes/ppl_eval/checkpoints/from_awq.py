"""AWQ's files in AutoAWQ's form ``gemm``: ``qweight``, ``qzeros`` and ``scales`` of every quantised layer.

The weight is stored transposed, eight output columns of 4 bits to a word: ``qweight`` [in_features, words],
``qzeros`` [groups, words], ``scales`` [groups, out_features]. Within a word the columns have the order 0, 2,
4, 6, 1, 3, 5, 7 from the lowest bits on (``AWQ_ORDER`` in AutoAWQ's ``packing_utils.py``).
"""

from functools import partial
from typing import Any

import torch

from ppl_eval.checkpoints.packed_values import (
    PackedWeight,
    Stored,
    check_dtype,
    check_shape,
    in_blocks,
    layers_with,
    num_groups,
    setting,
    unpack_codes,
)

BITS, IN_A_WORD = 4, 8
# At which place of its word each column is.
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def find(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the quantised weights of a checkpoint.

    Args:
        stored: all its tensors.
        config: ``quantization_config``.

    Raises:
        ValueError: for a packing that is not known here, or tensors that contradict the config.
    """
    form = str(config.get("version", config.get("format", "gemm"))).lower()
    if form != "gemm" or config.get("backend") == "llm-awq":
        raise ValueError(
            f"the weights are AWQ packed for the kernel {form!r} (backend {config.get('backend')!r}); only"
            " AutoAWQ's gemm is read: take the model's gemm files"
        )
    bits = setting(config, "bits", int, config.get("w_bit"))
    if bits != BITS:
        raise ValueError(f"AWQ's files have {BITS} bits; quantization_config says {bits}")
    group_size = setting(config, "group_size", int, config.get("q_group_size"))
    return [_layer(stored, layer, group_size) for layer in layers_with(stored, "qweight")]


def _layer(stored: Stored, layer: str, group_size: int) -> PackedWeight:
    parts = tuple(f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))
    columns, words = stored[parts[0]].meta.shape
    rows, groups = words * IN_A_WORD, num_groups(columns, group_size, layer)
    check_shape(stored, parts[1], (groups, words))
    check_shape(stored, parts[2], (groups, rows))
    for name in parts[:2]:
        check_dtype(stored, name, torch.int32)
    read = partial(_dequantize, stored, parts, (rows, columns), columns // groups)
    scheme = f"int{BITS}, groups of {columns // groups}"
    return PackedWeight(f"{layer}.weight", parts, (rows, columns), scheme, read)


def _dequantize(
    stored: Stored, parts: tuple[str, ...], shape: tuple[int, int], group_size: int
) -> torch.Tensor:
    words_DW, zeros_GW, scales_GN = (stored[name].read() for name in parts)

    def codes(words: torch.Tensor) -> torch.Tensor:
        inside = unpack_codes(words.contiguous(), BITS, words.shape[1] * IN_A_WORD)
        return inside.unflatten(1, (-1, IN_A_WORD))[:, :, list(PLACE)].flatten(1)

    def values(block: slice) -> torch.Tensor:
        own = slice(block.start // IN_A_WORD, -(-block.stop // IN_A_WORD))
        zeros = codes(zeros_GW[:, own]).repeat_interleave(group_size, dim=0)
        scales = scales_GN[:, block].float().repeat_interleave(group_size, dim=0)
        return ((codes(words_DW[:, own]) - zeros) * scales).T

    return in_blocks(shape, values, multiple=IN_A_WORD)
