"""GPTQ's files: ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of every quantised layer.

The weight is stored transposed: codes of 2, 3, 4 or 8 bits run down the columns of ``qweight`` [words,
out_features], and along the rows of ``qzeros`` [groups, words]. Input column i belongs to the group
``g_idx[i]``. Files of version 1 hold every zero point less one (``pack`` of AutoGPTQ's ``qlinear_cuda.py``),
those of version 2 as it is.
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

BITS = (2, 3, 4, 8)
# What is added to a stored zero point.
VERSIONS = {"gptq": 1, "gptq_v2": 0}


def find(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the quantised weights of a checkpoint.

    Args:
        stored: all its tensors.
        config: ``quantization_config``.

    Raises:
        ValueError: for a packing that is not known here, or tensors that contradict the config.
    """
    form = config.get("checkpoint_format", config.get("format", "gptq"))
    if form not in VERSIONS or config.get("is_marlin_format"):
        raise ValueError(
            f"the weights are GPTQ packed for one kernel (checkpoint_format {form}, is_marlin_format"
            f" {bool(config.get('is_marlin_format'))}); read are {', '.join(VERSIONS)}: take the model's"
            " ordinary GPTQ files, or convert it with gptqmodel"
        )
    if config.get("pack_dtype", "int32") != "int32":
        raise ValueError(f"GPTQ's codes are packed into {config['pack_dtype']}; only int32 is read")
    return [_layer(stored, config, layer, VERSIONS[form]) for layer in layers_with(stored, "qweight")]


def _layer(stored: Stored, config: dict[str, Any], layer: str, zero_offset: int) -> PackedWeight:
    names = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    for part in ("qzeros", "scales"):
        if names[part] not in stored:
            raise ValueError(f"the checkpoint has {names['qweight']} and no {names[part]}")
    words, rows = stored[names["qweight"]].meta.shape
    groups = stored[names["scales"]].meta.shape[0]
    # `dynamic` gives layers bits of their own, by patterns; the tensors say the same.
    bits = stored[names["qzeros"]].meta.shape[1] * 32 // rows
    stated = setting(config, "bits", int)
    if bits not in BITS or (bits != stated and not config.get("dynamic")):
        raise ValueError(
            f"{layer} has codes of {bits} bits; quantization_config says {stated} ({BITS} exist)"
        )
    columns = words * 32 // bits
    check_shape(stored, names["qweight"], (columns * bits // 32, rows))
    check_shape(stored, names["qzeros"], (groups, rows * bits // 32))
    check_shape(stored, names["scales"], (groups, rows))
    for part in ("qweight", "qzeros"):
        check_dtype(stored, names[part], torch.int32)
    group_size = setting(config, "group_size", int)
    if not config.get("dynamic") and groups != num_groups(columns, group_size, layer):
        raise ValueError(f"{layer} has {groups} groups, quantization_config says group_size {group_size}")
    if names["g_idx"] in stored:
        check_shape(stored, names["g_idx"], (columns,))
    else:
        del names["g_idx"]
    ordered = bool(config.get("desc_act", False))
    size = columns // groups
    form = "sorted by activation, " if ordered else ""
    scheme = f"int{bits}, groups of {size}, {form}" + ("zero points less one" if zero_offset else "version 2")
    read = partial(_dequantize, stored, names, bits, (rows, columns), (ordered, zero_offset))
    return PackedWeight(f"{layer}.weight", tuple(names.values()), (rows, columns), scheme, read)


def _dequantize(
    stored: Stored, names: dict[str, str], bits: int, shape: tuple[int, int], form: tuple[bool, int]
) -> torch.Tensor:
    rows, columns = shape
    ordered, zero_offset = form
    scales_GN = stored[names["scales"]].read().float()
    zeros_GN = unpack_codes(stored[names["qzeros"]].read(), bits, rows)
    if zero_offset and bool((zeros_GN == (1 << bits) - 1).any()):
        raise ValueError(
            f"{names['qzeros']} holds the code {(1 << bits) - 1} for a zero point less one: some libraries"
            f" read it as 0, others as {1 << bits}; write the model as checkpoint_format gptq_v2"
        )
    zeros_GN = (zeros_GN + zero_offset).float()
    group_D = _groups(stored, names, columns, scales_GN.shape[0], ordered)
    words = stored[names["qweight"]].read()

    def values(block: slice) -> torch.Tensor:
        codes_ND = unpack_codes(words[:, block].T.contiguous(), bits, columns)
        return (codes_ND - zeros_GN[:, block].T[:, group_D]) * scales_GN[:, block].T[:, group_D]

    return in_blocks(shape, values)


def _groups(stored: Stored, names: dict[str, str], columns: int, groups: int, ordered: bool) -> torch.Tensor:
    """Return the group of every column; kernels look at ``g_idx`` only where desc_act says so."""
    plain_D = torch.arange(columns) // (columns // groups)
    if "g_idx" not in names:
        if ordered:
            raise ValueError(f"{names['qweight']}: desc_act is true, and the layer has no g_idx")
        return plain_D
    group_D = stored[names["g_idx"]].read().long()
    if int(group_D.min()) < 0 or int(group_D.max()) >= groups:
        raise ValueError(f"{names['g_idx']} names groups outside 0 to {groups - 1}")
    if not ordered and not torch.equal(group_D, plain_D):
        raise ValueError(
            f"{names['g_idx']} sorts columns, and quantization_config says desc_act: false, by which kernels"
            " ignore it: set desc_act to true in config.json if the model was quantised so"
        )
    return group_D
