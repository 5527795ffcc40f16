"""Weights packed as the tools that publish them do, and what those tools say the weights then are.

compressed-tensors and bitsandbytes are called. GPTQ's and AWQ's packing is transcribed, since their packages
need a GPU or old releases of transformers: ``pack_original`` of gptqmodel 7.7
(``nn_modules/qlinear/__init__.py``) and ``WQLinear_GEMM.from_linear`` of AutoAWQ 0.2.9
(``modules/linear/gemm.py``), with whole numbers in place of rounded weights.
"""

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def codes(shape, bits, seed):
    """Random codes of so many bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.int32)


def scales_like(shape, seed):
    """Random scales in float16, as both tools store them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).half()


def exact(codes_NK, zeros_NG, scales_NG, group_K):
    """(code - zero point) * scale in float64, the group of each column given."""
    difference = codes_NK.double() - zeros_NG.double()[:, group_K]
    return difference * scales_NG.double()[:, group_K]


def gptq_layer(rows, columns, bits, group_size, *, desc_act=False, version=1, seed=0):
    """(tensors of one layer, its weights in float64); zero points are small enough for version 1."""
    groups = columns // group_size
    codes_NK = codes((rows, columns), bits, seed)
    zeros_NG = codes((rows, groups), bits, seed + 1).clamp(1 if version == 1 else 0)
    scales_NG = scales_like((rows, groups), seed + 2)
    group_K = torch.arange(columns) // group_size
    if desc_act:
        group_K = group_K[torch.randperm(columns, generator=torch.Generator().manual_seed(seed + 3))]
    zeros_GN = zeros_NG.T.contiguous() - (1 if version == 1 else 0)
    tensors = {
        "qweight": _down_the_columns(codes_NK.T.contiguous().numpy(), bits),
        "qzeros": _down_the_columns(zeros_GN.T.contiguous().numpy(), bits).T.contiguous(),
        "scales": scales_NG.T.contiguous(),
        "g_idx": group_K.int(),
    }
    return tensors, exact(codes_NK, zeros_NG, scales_NG, group_K)


def _down_the_columns(ints, bits):
    """gptqmodel's loops, word by word."""
    ints = ints.astype(np.uint32)
    words = np.zeros((ints.shape[0] * bits // 32, ints.shape[1]), dtype=np.uint32)
    if bits in (2, 4, 8):
        for row in range(words.shape[0]):
            for j in range(32 // bits):
                words[row] |= ints[row * (32 // bits) + j] << (bits * j)
        return torch.from_numpy(words.astype(np.int32))
    i = row = 0
    while row < words.shape[0]:
        for j in range(i, i + 10):
            words[row] |= ints[j] << (3 * (j - i))
        i += 10
        words[row] |= ints[i] << 30
        row += 1
        words[row] |= (ints[i] >> 2) & 1
        i += 1
        for j in range(i, i + 10):
            words[row] |= ints[j] << (3 * (j - i) + 1)
        i += 10
        words[row] |= ints[i] << 31
        row += 1
        words[row] |= (ints[i] >> 1) & 0x3
        i += 1
        for j in range(i, i + 10):
            words[row] |= ints[j] << (3 * (j - i) + 2)
        i += 10
        row += 1
    return torch.from_numpy(words.astype(np.int32))


def awq_layer(rows, columns, group_size, *, seed=0):
    """(tensors of one layer, its weights in float64)."""
    groups = columns // group_size
    codes_KN, zeros_GN = codes((columns, rows), 4, seed), codes((groups, rows), 4, seed + 1)
    scales_GN = scales_like((groups, rows), seed + 2)
    tensors = {"qweight": _awq_words(codes_KN), "qzeros": _awq_words(zeros_GN), "scales": scales_GN}
    group_K = torch.arange(columns) // group_size
    return tensors, exact(codes_KN.T, zeros_GN.T, scales_GN.T, group_K)


def _awq_words(ints):
    words = torch.zeros((ints.shape[0], ints.shape[1] // 8), dtype=torch.int32)
    for word in range(words.shape[1]):
        for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] |= ints[:, word * 8 + column] << (i * 4)
    return words


def compressed(weight, form, weights, **group):
    """(tensors of one layer, what the library makes of them in its own dtype and in float32).

    Args:
        weight: to be quantised.
        form: compressed-tensors' name of the format.
        weights: its quantisation arguments.
        group: further keys of the group, such as input_activations.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, **group)
    compressor = BaseCompressor.get_value_from_registry(form)
    rows, columns = weight.shape
    blocks = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, arguments.group_size),
        "block": tuple(arguments.block_structure or ()),
    }[arguments.strategy]
    padded = torch.nn.functional.pad(weight, (0, -columns % blocks[1], 0, -rows % blocks[0]))
    tiles = padded.unfold(0, blocks[0], blocks[0]).unfold(1, blocks[1], blocks[1])
    scale, zero = calculate_qparams(tiles.amin((2, 3)), tiles.amax((2, 3)), arguments)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    if arguments.strategy == "tensor":
        state["weight_scale"], state["weight_zero_point"] = scale.reshape(1), zero.reshape(1)
    stored = compressor.compress(state, scheme)
    own = compressor.decompress(stored, scheme)["weight"]
    wide = {**stored}
    if stored["weight_scale"].is_floating_point():
        wide["weight_scale"] = stored["weight_scale"].float()
    return stored, own, compressor.decompress(wide, scheme)["weight"]


def nvfp4_layer(rows, columns, *, seed=0):
    """(tensors of one layer, what compressed-tensors makes of them in bf16)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8),
        "weight_scale": (torch.rand((rows, columns // 16), generator=generator) * 400).to(
            torch.float8_e4m3fn
        ),
        "weight_global_scale": torch.tensor([2345.6]),
    }
    decompress = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress
    return tensors, decompress(tensors, scheme)["weight"]


def nf4_layer(weight, kind="nf4", nested=True):
    """(tensors of one layer, what bitsandbytes makes of them in float32)."""
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        weight.float(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    tensors = {"weight": packed} | {
        f"weight.{name}": value.contiguous() for name, value in state.as_dict(packed=True).items()
    }
    return tensors, functional.dequantize_4bit(packed, state)


def fp8_layer(weight, blocks):
    """(tensors of one layer in DeepSeek's form, its weights in float64)."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // blocks[0]), -(-columns // blocks[1]))
    codes, exact_weight = (
        torch.empty_like(weight, dtype=torch.float8_e4m3fn),
        torch.empty(rows, columns).double(),
    )
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(i * blocks[0], (i + 1) * blocks[0]), slice(j * blocks[1], (j + 1) * blocks[1]))
            # Powers of two times 1.5: products with an fp8 number are exact in float32.
            scale[i, j] = 1.5 * 2.0 ** -(i + 3 * j + 5)
            codes[tile] = (weight[tile] / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            exact_weight[tile] = codes[tile].double() * scale[i, j].double()
    return {"weight": codes, "weight_scale_inv": scale}, exact_weight
