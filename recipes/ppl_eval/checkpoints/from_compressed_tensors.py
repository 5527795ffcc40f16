"""compressed-tensors' files (llm-compressor, RedHat's and Neural Magic's models).

Every group of ``config_groups`` says for its targets how weights, inputs and outputs are quantised. Codes are
stored as integers or fp8 (``<layer>.weight``), or packed (``<layer>.weight_packed``); beside them are
``weight_scale``, ``weight_zero_point`` for asymmetric ones, and ``weight_g_idx`` where old files sort columns
by activation.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ppl_eval.checkpoints.packed_values import (
    PackedWeight,
    Stored,
    check_dtype,
    check_shape,
    e8m0,
    in_blocks,
    layers_with,
    num_blocks,
    num_groups,
    per_block,
    unpack_codes,
    unpack_e2m1,
)

PACKED = "pack-quantized"
# Codes as they are: torch has a dtype for them.
PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
# Keys of a group's `weights`: those read here, and those that only its making needed.
_READ = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder", "dynamic"}
_OF_ITS_MAKING = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
_FOR_ACTIVATIONS = re.compile(r"\.(input|output|q|k|v)_(global_)?(scale|zero_point)$")
# Backtracking without end: a repeated group that repeats.
_ENDLESS = re.compile(r"\([^()]*[+*}][^()]*\)[+*{]")


class _Group(NamedTuple):
    """How the weights of some layers are quantised."""

    name: str
    targets: list[str]
    form: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    ordered: bool


def activations(config: Mapping[str, Any]) -> str | None:
    """Return what the model does to activations, or None where it does nothing."""
    groups = config.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, dict) else ():
        for key in ("input_activations", "output_activations"):
            arguments = group.get(key) if isinstance(group, dict) else None
            if arguments:
                how = "per token as they come" if arguments.get("dynamic") else "with stored scales"
                found.append(
                    f"{key} in {arguments.get('num_bits', 8)}-bit {arguments.get('type', 'int')}, {how}"
                )
    if config.get("kv_cache_scheme"):
        found.append("keys and values of attention")
    return "; ".join(dict.fromkeys(found)) or None


def find(stored: Stored, config: dict[str, Any]) -> list[PackedWeight]:
    """Return the quantised weights of a checkpoint.

    Args:
        stored: all its tensors.
        config: ``quantization_config``.

    Raises:
        ValueError: for a scheme that is not known here, or tensors that contradict the config.
    """
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if config.get(key) and (config[key] or {}).get("format", key) != "dense":
            raise ValueError(f"compressed-tensors with {key} is not read; take the full-precision checkpoint")
    if config.get("quantization_status", "compressed") != "compressed":
        raise ValueError(
            f"quantization_config has quantization_status={config['quantization_status']!r}: the weights are"
            " not stored in compressed form; save them with save_compressed=True"
        )
    if not isinstance(config.get("config_groups"), dict):
        raise ValueError("quantization_config of compressed-tensors has no config_groups")
    groups = [_group(name, each, config) for name, each in config["config_groups"].items()]
    packed = layers_with(stored, "weight_packed")
    plain = [layer for layer in layers_with(stored, "weight_scale") if layer not in set(packed)]
    found = [_layer(stored, layer, _group_of(layer, groups)) for layer in (*packed, *plain)]
    ignored = sorted(
        {weight.name.removesuffix(".weight") for weight in found} & set(config.get("ignore") or ())
    )
    if ignored:
        raise ValueError(f"quantization_config ignores {ignored[:10]}, and the checkpoint has them quantised")
    if not found:
        return found
    # Scales of keys and values belong to attention, not to a weight.
    others = tuple(name for name in stored if _FOR_ACTIVATIONS.search(name))
    return [*found[:-1], found[-1]._replace(parts=(*found[-1].parts, *others))]


def _group(name: str, given: Any, config: Mapping[str, Any]) -> _Group:
    weights = given.get("weights") if isinstance(given, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"config_groups.{name} does not say how weights are quantised; it is not read")
    unknown = sorted(set(weights) - _READ - _OF_ITS_MAKING)
    if unknown or weights.get("dynamic"):
        raise ValueError(
            f"config_groups.{name}.weights has {unknown or 'dynamic: true'}, which is not known here"
        )
    form = str(given.get("format") or config.get("format"))
    bits, kind = weights.get("num_bits", 8), str(weights.get("type", "int")).lower()
    known = {PACKED: kind == "int" and type(bits) is int and 1 <= bits <= 8}
    known |= dict.fromkeys(PLAIN, bits == 8) | dict.fromkeys(FP4, (bits, kind) == (4, "float"))
    if not known.get(form, False):
        raise ValueError(
            f"config_groups.{name} has {bits}-bit {kind} weights in the format {form!r}; read are"
            f" {', '.join((PACKED, *PLAIN, *FP4))}: take the full-precision checkpoint and set `quantizer`"
        )
    size, block = weights.get("group_size") or -1, weights.get("block_structure")
    strategy = weights.get("strategy") or ("group" if size > 0 else "channel" if size == -1 else "tensor")
    if weights.get("strategy") is None and weights.get("group_size") is None:
        strategy = "tensor"
    return _Group(
        name,
        list(given.get("targets") or ()),
        form,
        bits,
        weights.get("symmetric", True) is True,
        str(strategy).lower(),
        int(size),
        (int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None,
        str(weights.get("actorder")).lower() in ("group", "dynamic", "true"),
    )


def _group_of(layer: str, groups: list[_Group]) -> _Group:
    """Return the group whose target is the layer: by its name, then by a pattern, then by its class."""
    if len(groups) == 1:
        return groups[0]
    for matches in (lambda target: target == layer, partial(_matches, layer), lambda t: t == "Linear"):
        found = [group for group in groups if any(map(matches, group.targets))]
        if len({group[2:] for group in found}) > 1:
            raise ValueError(f"{layer} is a target of several config_groups: {[g.name for g in found]}")
        if found:
            return found[0]
    raise ValueError(f"{layer} is stored quantised and is a target of none of the config_groups")


def _matches(layer: str, target: str) -> bool:
    pattern = target.removeprefix("re:")
    if pattern == target:
        return False
    try:
        if _ENDLESS.search(pattern) or len(pattern) > 300:
            raise re.error("it may take forever")
        return re.match(pattern, layer) is not None
    except re.error as e:
        raise ValueError(f"config_groups has the target {target!r}, which is no usable pattern: {e}") from e


def _layer(stored: Stored, layer: str, group: _Group) -> PackedWeight:
    codes = f"{layer}.weight_packed" if group.form in (PACKED, *FP4) else f"{layer}.weight"
    if codes not in stored or stored[codes].meta.dim() != 2:
        raise ValueError(f"{layer} has a scale and no matrix {codes} (format {group.form})")
    check_dtype(stored, codes, *((torch.int32,) if group.form == PACKED else _CODES))
    parts = [codes, f"{layer}.weight_scale"]
    rows, width = stored[codes].meta.shape
    if group.form == PACKED:
        check_shape(stored, f"{layer}.weight_shape", (2,))
        parts.append(f"{layer}.weight_shape")
        shape = tuple(stored[parts[-1]].read().tolist())
        if shape[0] != rows or -(-shape[1] * group.bits // 32) != width:
            raise ValueError(f"{parts[-1]} is {list(shape)}, and {codes} is {rows} x {width} words")
        width = shape[1]
    elif group.form in FP4:
        width *= 2
    sizes, grid = _sizes(group, (rows, width), layer)
    allowed = (
        (grid, (), (1,))
        if group.strategy == "tensor"
        else (grid, (rows,))
        if sizes == (1, width)
        else (grid,)
    )
    check_shape(stored, parts[1], *allowed)
    zeros = f"{layer}.weight_zero_point"
    if zeros in stored:
        parts.append(zeros)
        packed_zeros = (-(-grid[0] * group.bits // 32), grid[1])
        if group.form == PACKED and stored[zeros].meta.dtype == torch.int32:
            check_shape(stored, zeros, packed_zeros)
        else:
            check_shape(stored, zeros, *allowed)
    elif not group.symmetric:
        raise ValueError(f"{layer} is quantised asymmetrically and has no {zeros}")
    if f"{layer}.weight_g_idx" in stored:
        check_shape(stored, f"{layer}.weight_g_idx", (width,))
        parts.append(f"{layer}.weight_g_idx")
    if group.form == FP4[0]:
        check_shape(stored, f"{layer}.weight_global_scale", (1,), ())
        parts.append(f"{layer}.weight_global_scale")
    read = partial(_dequantize, stored, layer, group, (rows, width), sizes)
    return PackedWeight(f"{layer}.weight", tuple(parts), (rows, width), _scheme(group), read)


def _sizes(group: _Group, shape: tuple[int, int], layer: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many rows and columns share a scale, and how many scales there are of both."""
    rows, columns = shape
    if group.strategy == "tensor":
        return shape, (1, 1)
    if group.strategy in ("channel", "token"):
        return (1, columns), (rows, 1)
    if group.strategy in ("group", "tensor_group"):
        num = num_groups(columns, min(group.group_size, columns), layer)
        return (1, columns // num), (rows, num)
    if group.strategy == "block" and group.block:
        return group.block, num_blocks(shape, group.block)
    raise ValueError(
        f"config_groups.{group.name} has the strategy {group.strategy!r}, which is not known here"
    )


def _scheme(group: _Group) -> str:
    kind = "fp" if group.form in (*FP4, "float-quantized", "mxfp8-quantized") else "int"
    share = {"tensor": "one scale for a matrix", "channel": "one scale for a row"}.get(group.strategy)
    share = share or (f"blocks of {group.block}" if group.block else f"groups of {group.group_size}")
    return f"{group.form}: {kind}{group.bits}, {share}{'' if group.symmetric else ', asymmetric'}"


def _dequantize(
    stored: Stored, layer: str, group: _Group, shape: tuple[int, int], sizes: tuple[int, int]
) -> torch.Tensor:
    columns = shape[1]
    grid = num_blocks(shape, sizes)
    codes = stored[f"{layer}.weight_packed" if group.form in (PACKED, *FP4) else f"{layer}.weight"].read()
    scales = stored[f"{layer}.weight_scale"].read()
    scales = (e8m0(scales) if scales.dtype == torch.uint8 else scales.float()).reshape(grid)
    if group.form == FP4[0]:
        scales = scales / stored[f"{layer}.weight_global_scale"].read().float()
    zeros = _zero_points(stored, layer, group, grid)
    columns_of = _order(stored, layer, group, columns, grid[1])

    def values(block: slice) -> torch.Tensor:
        own = _values(codes[block], group, columns)
        if zeros is not None:
            own = own - per_block(zeros, sizes, block, columns)[:, columns_of]
        return own * per_block(scales, sizes, block, columns)[:, columns_of]

    return in_blocks(shape, values)


def _values(codes: torch.Tensor, group: _Group, columns: int) -> torch.Tensor:
    if group.form == PACKED:
        return (unpack_codes(codes, group.bits, columns) - (1 << (group.bits - 1))).float()
    return unpack_e2m1(codes) if group.form in FP4 else codes.float()


def _zero_points(stored: Stored, layer: str, group: _Group, grid: tuple[int, int]) -> torch.Tensor | None:
    name = f"{layer}.weight_zero_point"
    if name not in stored:
        return None
    zeros = stored[name].read()
    if group.form == PACKED and zeros.dtype == torch.int32:
        # Packed along the rows, as weights are along the columns.
        zeros = unpack_codes(zeros.T.contiguous(), group.bits, grid[0]).T - (1 << (group.bits - 1))
    if group.symmetric and bool(zeros.float().any()):
        raise ValueError(f"{name} is not zero, and quantization_config says that the weights are symmetric")
    return zeros.float().reshape(grid)


def _order(stored: Stored, layer: str, group: _Group, columns: int, groups: int) -> Any:
    """Return for every column one whose place has its scale: itself, unless columns were sorted."""
    name = f"{layer}.weight_g_idx"
    plain = torch.arange(columns)
    if name not in stored:
        if group.ordered:
            raise ValueError(f"{layer} is sorted by activation (actorder) and has no {name}")
        return slice(None)
    group_of = stored[name].read().long()
    if bool((group_of == -1).all()):  # how unsorted files say so
        return slice(None)
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ValueError(f"{name} names groups outside 0 to {groups - 1}")
    if not group.ordered and not torch.equal(group_of, plain // (columns // groups)):
        raise ValueError(f"{name} sorts columns, and quantization_config has no actorder that says so")
    return group_of * (columns // groups)
