"""Quantised files as published give the numbers that their own libraries compute from them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import packed_files as pack
from helpers import tiny_checkpoints as tiny
from ppl_eval.checkpoints import packed_values
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.packed_values import unpack_codes

LINEARS = 7 * tiny.LAYERS
W4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed_tensors(form, weights, **group):
    """quantization_config of a checkpoint whose linear layers are all quantised alike, except the head."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **group}}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return section | {"ignore": ["lm_head"], "quantization_status": "compressed"}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of rows for every weight."""
    monkeypatch.setattr(packed_values, "VALUES_AT_ONCE", 600)


@pytest.fixture
def published(tmp_path):
    """Writes a tiny untied Llama with packed layers; returns its section and that of what it stands for.

    `pack_layer(index, weight)` gives a layer's tensors and its weights.
    """

    def write(pack_layer, quantization_config, beside=None):
        hf = tiny.to_hf(tiny.random_weights(tiny.untied))
        packed, exact = {}, {}
        for index, (name, weight) in enumerate(hf.items()):
            if "_proj" not in name:
                packed[name] = exact[name] = weight
                continue
            tensors, values = pack_layer(index, weight)
            packed |= {
                f"{name.removesuffix('.weight')}.{part}": tensor.contiguous()
                for part, tensor in tensors.items()
            }
            exact[name] = values.float().contiguous()
        sections = []
        for folder, tensors in ((tmp_path / "packed", packed), (tmp_path / "exact", exact)):
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / "model.safetensors")
            sections.append({"_component_": tiny.HF, "checkpoint_dir": str(folder), "model_type": "LLAMA2"})
        config = tiny.HF_CONFIG | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
        (tmp_path / "exact" / "config.json").write_text(json.dumps(config))
        if beside is None:
            config |= {"quantization_config": quantization_config}
        else:
            (tmp_path / "packed" / beside).write_text(json.dumps(quantization_config))
        (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
        return sections

    return write


def assert_same(sections, **keys):
    """Reads both and compares every weight, bit for bit; returns the packed one."""
    opened, exact = load_state_dict(sections[0] | keys), load_state_dict(sections[1])
    assert set(opened.state_dict) == set(exact.state_dict)
    for name in exact.state_dict:
        assert torch.equal(opened.state_dict[name], exact.state_dict[name]), name
    assert opened.state_dict["layers.0.attn.q_proj.weight"].dtype == torch.float32
    assert not opened.quantized
    return opened


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_codes_are_a_stream_of_bits_as_compressed_tensors_has_it(bits):
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    codes_NK = pack.codes((3, 70), bits, seed=bits)
    words = pack_to_int32((codes_NK - (1 << (bits - 1))).to(torch.int8), bits)
    assert torch.equal(unpack_codes(words, bits, 70), codes_NK)


def test_codes_by_hand():
    # 0x87654321: the lowest four bits come first; then eight numbers of three bits.
    assert unpack_codes(torch.tensor([[-0x789ABCDF]], dtype=torch.int32), 4, 8).tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8]
    ]
    words = torch.tensor([[0b11_010_001_000_111_110_101_100_011_010_001 - (1 << 32), 0b1]], dtype=torch.int32)
    assert unpack_codes(words, 3, 11).tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 7]]


SCHEMES = {
    "w4a16": ("pack-quantized", W4),
    "w4a16 asymmetric": ("pack-quantized", W4 | {"symmetric": False}),
    "w8a16 by row": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "w3a16": ("pack-quantized", W4 | {"num_bits": 3}),
    "int8 by row": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 asymmetric": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8 of a matrix": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8 by row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 of a matrix": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 by blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 48]},
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_gives_the_librarys_numbers(published, small_blocks, scheme):
    form, weights = SCHEMES[scheme]
    rounded = {}

    def layer(index, weight):
        stored, rounded[index], exact = pack.compressed(weight, form, weights)
        return stored, exact

    sections = published(layer, compressed_tensors(form, weights))
    opened = assert_same(sections)
    assert opened.packing.startswith(f"compressed-tensors: {LINEARS} weights {form}: ")
    assert opened.notes[-1] == "not quantised in the checkpoint: lm_head"
    # In the dtype of the scales, the library's rounding is ours: one, at the end.
    ours = opened.state_dict["layers.0.mlp.w1.weight"].bfloat16()
    hf = list(tiny.to_hf(tiny.random_weights(tiny.untied)))
    assert torch.equal(ours, rounded[hf.index("model.layers.0.mlp.gate_proj.weight")])


def test_groups_with_schemes_of_their_own_are_told_apart(published):
    down = {"num_bits": 8, "strategy": "channel"}

    def layer(index, weight):
        form, weights = ("int-quantized", down) if weight.shape[1] == tiny.HIDDEN else ("pack-quantized", W4)
        stored, _, exact = pack.compressed(weight, form, weights)
        return stored, exact

    config = compressed_tensors("mixed-precision", W4, format="pack-quantized")
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*down_proj$"],
        "weights": down,
        "format": "int-quantized",
    }
    opened = assert_same(published(layer, config))
    assert f"{6 * tiny.LAYERS} weights pack-quantized: int4" in opened.packing
    assert f"{tiny.LAYERS} weights int-quantized: int8" in opened.packing


def test_columns_sorted_by_activation_are_put_back(published, small_blocks):
    """``weight_g_idx``, which compressed-tensors wrote until 2026; the formula is its old one, by hand."""

    def layer(index, weight):
        rows, columns = weight.shape
        codes_NK = pack.codes((rows, columns), 4, seed=index)
        scales_NG = pack.scales_like((rows, columns // 32), seed=index + 1)
        group_K = (torch.arange(columns) // 32)[torch.randperm(columns)]
        from compressed_tensors.compressors.pack_quantized import pack_to_int32

        stored = {
            "weight_packed": pack_to_int32((codes_NK - 8).to(torch.int8), 4),
            "weight_scale": scales_NG,
            "weight_shape": torch.tensor([rows, columns]),
            "weight_g_idx": group_K.int(),
        }
        return stored, pack.exact(codes_NK, torch.full_like(scales_NG, 8), scales_NG, group_K)

    sections = published(layer, compressed_tensors("pack-quantized", W4 | {"actorder": "group"}))
    assert_same(sections)
    sections = published(layer, compressed_tensors("pack-quantized", W4))
    with pytest.raises(
        ValueError, match="weight_g_idx sorts columns, and quantization_config has no actorder"
    ):
        dict(load_state_dict(sections[0]).state_dict)


def test_nvfp4_gives_the_librarys_numbers_in_bf16(published, small_blocks):
    rounded = {}

    def layer(index, weight):
        stored, rounded[index] = pack.nvfp4_layer(*weight.shape, seed=index)
        return stored, rounded[index]

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    sections = published(layer, compressed_tensors("nvfp4-pack-quantized", weights))
    opened, exact = load_state_dict(sections[0]), load_state_dict(sections[1])
    for name, weight in opened.state_dict.items():
        assert torch.equal(weight.bfloat16(), exact.state_dict[name].bfloat16()), name


def test_transformers_scores_the_same_with_its_own_reading(published):
    """NLL of every token, float32, by transformers with compressed-tensors' ``dequantize=True``."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from helpers.models import on_meta
    from ppl_eval.checkpoints.lazy_state_dict import load_into

    def layer(index, weight):
        stored, _, exact = pack.compressed(weight.float(), "pack-quantized", W4 | {"symmetric": False})
        return stored, exact

    section, _ = published(layer, compressed_tensors("pack-quantized", W4 | {"symmetric": False}))
    model = on_meta(tiny.untied)
    load_into(model, load_state_dict(section).state_dict, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        section["checkpoint_dir"],
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    ).eval()
    tokens_BT = torch.randint(0, tiny.VOCAB, (2, 17), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found = torch.log_softmax(model(tokens_BT), -1)
        expected = torch.log_softmax(theirs(tokens_BT).logits, -1)
    assert float((found - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_by_its_packers_own_loops(published, small_blocks, bits, version):
    def layer(index, weight):
        return pack.gptq_layer(*weight.shape, bits, 32, version=version, seed=index)

    config = GPTQ | {"bits": bits} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})
    opened = assert_same(published(layer, config))
    form = "version 2" if version == 2 else "zero points less one"
    assert opened.packing == f"gptq: {LINEARS} weights int{bits}, groups of 32, {form}"


def test_gptq_sorted_by_activation_and_with_its_own_file_of_settings(published, small_blocks):
    def layer(index, weight):
        return pack.gptq_layer(*weight.shape, 4, 32, desc_act=True, seed=index)

    config = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    opened = assert_same(published(layer, config | {"desc_act": True}, beside="quantize_config.json"))
    assert "sorted by activation" in opened.packing
    with pytest.raises(ValueError, match="g_idx sorts columns, and quantization_config says desc_act: false"):
        dict(load_state_dict(published(layer, GPTQ)[0]).state_dict)


def test_gptq_layers_with_bits_of_their_own(published):
    """gptqmodel's ``dynamic`` names them by patterns; the tensors say the same."""

    def layer(index, weight):
        return pack.gptq_layer(*weight.shape, 8 if weight.shape[1] == tiny.HIDDEN else 4, 32, seed=index)

    opened = assert_same(published(layer, GPTQ | {"dynamic": {r"+:.*down_proj": {"bits": 8}}}))
    assert f"{tiny.LAYERS} weights int8, groups of 32" in opened.packing
    with pytest.raises(ValueError, match=r"down_proj has codes of 8 bits; quantization_config says 4"):
        load_state_dict(published(layer, GPTQ)[0])


def test_a_zero_point_that_libraries_read_differently_is_refused(published):
    def layer(index, weight):
        tensors, exact = pack.gptq_layer(*weight.shape, 4, 32, seed=index)
        tensors["qzeros"] |= 0xF0
        return tensors, exact

    with pytest.raises(ValueError, match=r"code 15 for a zero point less one.*gptq_v2"):
        dict(load_state_dict(published(layer, GPTQ)[0]).state_dict)


def test_awq_by_its_packers_own_loops(published, small_blocks):
    def layer(index, weight):
        return pack.awq_layer(*weight.shape, 32, seed=index)

    opened = assert_same(published(layer, AWQ))
    assert opened.packing == f"awq: {LINEARS} weights int4, groups of 32"
    assert_same(
        published(
            layer,
            {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
            beside="quant_config.json",
        )
    )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_gives_the_librarys_numbers(published, kind, nested):
    def layer(index, weight):
        return pack.nf4_layer(weight, kind, nested)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    opened = assert_same(published(layer, config))
    assert f"{kind.upper()}, blocks of 64{', scales in 8 bits' if nested else ''}" in opened.packing


def test_fp8_by_blocks_as_transformers_dequantises_it(published, small_blocks):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    def layer(index, weight):
        stored, exact = pack.fp8_layer(weight, (32, 64))
        theirs = _dequantize_fp8_weight(stored["weight"], stored["weight_scale_inv"], [32, 64], torch.float32)
        assert torch.equal(theirs.double(), exact)
        return stored, exact

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]}
    sections = published(layer, config)
    with pytest.raises(ValueError, match=r"activations are rounded to fp8.*checkpointer\.dequantize=true"):
        load_state_dict(sections[0])
    opened = assert_same(sections, dequantize=True)
    assert "only weights are scored as published" in opened.notes[-1]


def test_mxfp4_as_transformers_unpacks_it(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from ppl_eval.checkpoints.packed_weights import unpack
    from ppl_eval.checkpoints.safetensors import read_safetensors

    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8)
    tensors = {"model.experts.down_proj_blocks": blocks, "model.experts.down_proj_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    found = unpack(
        read_safetensors(tmp_path / "model.safetensors"), {"quant_method": "mxfp4"}, weights_only=False
    )
    weight = found.stored["model.experts.down_proj"]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert weight.meta.shape == theirs.shape == (3, 64, 10)
    assert torch.equal(weight.read(), theirs)


def test_quantised_activations_are_another_number(published):
    def layer(index, weight):
        stored, _, exact = pack.compressed(weight, *SCHEMES["int8 by row"])
        return stored | {"input_scale": torch.ones(1)}, exact

    config = compressed_tensors(*SCHEMES["int8 by row"], input_activations=DYNAMIC)
    sections = published(layer, config)
    with pytest.raises(ValueError, match=r"input_activations in 8-bit int, per token.*dequantize=true"):
        load_state_dict(sections[0])
    opened = assert_same(sections, dequantize=True)
    assert "in use, input_activations in 8-bit int, per token" in opened.notes[-1]
    cache = compressed_tensors(*SCHEMES["int8 by row"]) | {"kv_cache_scheme": {"num_bits": 8}}
    with pytest.raises(ValueError, match="keys and values of attention"):
        load_state_dict(published(layer, cache)[0])


def w4(index, weight):
    stored, _, exact = pack.compressed(weight, "pack-quantized", W4)
    return stored, exact


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq .* is not read; compressed-tensors, gptq"),
        ({"quant_method": None}, "quantised by an unnamed method"),
        (GPTQ, "holds no weight that it packed"),
        ({"format": "marlin-24"}, "weights in the format 'marlin-24'; read are pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config is not read"),
        ({"transform_config": {"config_groups": {}}}, "with transform_config is not read"),
        ({"quantization_status": "frozen"}, "not stored in compressed form"),
        ({"ignore": ["model.layers.1.mlp.up_proj"]}, r"ignores \['model.layers.1.mlp.up_proj'\]"),
    ],
)
def test_what_is_not_read_is_refused_by_name(published, change, told):
    config = change if change is GPTQ else compressed_tensors("pack-quantized", W4) | change
    with pytest.raises(ValueError, match=told):
        load_state_dict(published(w4, config)[0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"group_size": 48}, "128 columns cannot be divided into groups of 48"),
        ({"group_size": 16}, r"weight_scale has the shape \[64, 4\]; .* asks for \[64, 8\]"),
        ({"symmetric": False}, "quantised asymmetrically and has no"),
        ({"num_bits": 8}, r"weight_shape is \[64, 128\], and .* is 64 x 16 words"),
        ({"num_bits": 9}, "9-bit int weights"),
        ({"hadamard": True}, r"\['hadamard'\], which is not known here"),
    ],
)
def test_settings_that_the_tensors_contradict_are_refused(published, change, told):
    config = compressed_tensors("pack-quantized", W4)
    config["config_groups"]["group_0"]["weights"] = W4 | change
    with pytest.raises(ValueError, match=told):
        load_state_dict(published(w4, config)[0])


@pytest.mark.parametrize(
    ("method", "change", "told"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ packed for one kernel .checkpoint_format marlin"),
        ("gptq", {"checkpoint_format": "gptq_p"}, "read are gptq, gptq_v2"),
        ("gptq", {"pack_dtype": "int16"}, "packed into int16"),
        ("gptq", {"bits": 8}, "codes of 4 bits; quantization_config says 8"),
        ("gptq", {"group_size": 64}, "has 4 groups, quantization_config says group_size 64"),
        ("awq", {"version": "gemv"}, "packed for the kernel 'gemv'"),
        ("awq", {"version": "marlin"}, "packed for the kernel 'marlin'"),
        ("awq", {"bits": 8}, "AWQ's files have 4 bits; quantization_config says 8"),
        ("awq", {"group_size": 64}, r"qzeros has the shape \[4, 8\].*asks for \[2, 8\]"),
    ],
)
def test_packings_for_one_kernel_and_wrong_settings_are_refused(published, method, change, told):
    def layer(index, weight):
        if method == "awq":
            return pack.awq_layer(*weight.shape, 32)
        return pack.gptq_layer(*weight.shape, 4, 32)

    with pytest.raises(ValueError, match=told):
        load_state_dict(published(layer, (AWQ if method == "awq" else GPTQ) | change)[0])


def test_a_weight_that_is_packed_and_whole_is_refused(published):
    section, _ = published(w4, compressed_tensors("pack-quantized", W4))
    path = f"{section['checkpoint_dir']}/model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"q_proj\.weight both packed and in full precision"):
        load_state_dict(section)
