"""GGUF files of every architecture score what transformers does, and every kind of block is dequantised."""

import gguf
import numpy as np
import pytest
import torch

from helpers import family_models as family
from helpers.gguf_files import write_family_gguf
from ppl_eval.checkpoints import gguf as reading
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.safetensors import map_tensor
from ppl_eval.models.config_check import check_config
from ppl_eval.models.families import correct, family_of

KINDS = gguf.GGMLQuantizationType
# Architectures whose GGUF files are not read.
_NOT_READ = ("olmo2", "granite3", "gemma3", "gemma3_scaled", "smollm3")
FILES = [
    case
    for case in family.CASES
    if case.name not in ("mistral", "qwen2_window", "gemma2", "phi4_mini", *_NOT_READ)
]


def opened(folder, case):
    """The checkpoint of a GGUF file in a folder of its own."""
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(folder)}
    model_type = family_of(family.BUILDERS[case.family]).model_type
    return load_state_dict(section | {"checkpoint_files": ["m.gguf"], "model_type": model_type})


def scored(loaded, case, num_inputs, dtype=torch.float64):
    """NLL of every token by the model that the file's own metadata describes."""
    component = family.BUILDERS[case.family]
    builder = family.BUILDERS[case.family]
    with family.precision(dtype):
        with torch.device("meta"):
            build = family._get_component_from_path(component)
            model = build(**family.arguments_for(loaded.hf_config, component))
        correct(model, builder, loaded.hf_config)
        assert check_config(model, builder, loaded.hf_config) == []
        load_into(model, loaded.state_dict, dtype=dtype)
    return family.torchtune_nll(model.eval(), num_inputs, dtype)


def assert_same_nll(loaded, case, folder, num_inputs):
    """Compare with transformers in float64; Gemma's norms lose their last bits where the file adds 1."""
    difference = scored(loaded, case, num_inputs) - family.transformers_nll(folder, num_inputs, torch.float64)
    assert np.abs(difference).max() < (5e-5 if case.family.startswith("gemma") else 1e-11)


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_gguf_of_a_family_scores_what_transformers_does(tmp_path, case):
    """Written in float32, so that the file holds the very weights that transformers has."""
    folder = family.checkpoint(case.name)
    write_family_gguf(tmp_path / "m.gguf", folder, KINDS.F32)
    loaded = opened(tmp_path, case)
    for num_inputs in (family.SHORT, family.LONG):
        assert_same_nll(loaded, case, folder, num_inputs)
    # The config.json that it was made from agrees with it, key by key.
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert any("agree with the config.json" in note for note in opened(tmp_path, case).notes)


def test_gemma2_scales_attention_by_llama_cpps_rule(tmp_path):
    """The file lacks query_pre_attn_scalar: it is the size of a head, but for the model of 46 layers."""
    case = next(case for case in family.CASES if case.name == "gemma2")
    folder = family.checkpoint("gemma2")
    write_family_gguf(tmp_path / "m.gguf", folder, KINDS.F32)
    loaded = opened(tmp_path, case)
    assert loaded.hf_config["query_pre_attn_scalar"] == 32
    # The tiny model was given 24, which its config.json says.
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"query_pre_attn_scalar: m\.gguf says 32, config\.json says 24"):
        opened(tmp_path, case)


def test_gemma2_scores_what_transformers_does(tmp_path):
    case = family.Case("gemma2_gguf", "gemma2", "Gemma2Config", dict(_gemma2_settings()))
    family.CASES.append(case)
    try:
        folder = family.checkpoint(case.name)
    finally:
        family.CASES.remove(case)
    write_family_gguf(tmp_path / "m.gguf", folder, KINDS.F32)
    assert_same_nll(opened(tmp_path, case), case, folder, family.LONG)


def _gemma2_settings():
    given = next(case for case in family.CASES if case.name == "gemma2").settings
    return given | {"query_pre_attn_scalar": given["head_dim"]}


@pytest.mark.parametrize("name", ["llama3", "qwen2_5"])
def test_transformers_reads_the_same_numbers_from_a_quantised_file(tmp_path, name):
    """Q8_0, dequantised by transformers' own port of llama.cpp's code."""
    from transformers import AutoModelForCausalLM

    case = next(case for case in family.CASES if case.name == name)
    write_family_gguf(tmp_path / "m.gguf", family.checkpoint(name), KINDS.Q8_0)
    loaded = opened(tmp_path, case)
    assert loaded.packing.startswith("GGUF: ")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokens_BT, labels_BT = family.random_tokens(family.SHORT)
    with torch.no_grad():
        log_probs = torch.log_softmax(theirs(tokens_BT).logits, -1)
    expected = -log_probs.gather(-1, labels_BT[..., None]).flatten().numpy()
    assert np.abs(scored(loaded, case, family.SHORT, torch.float32) - expected).max() < 1e-4


def test_a_file_without_its_window_says_so(tmp_path):
    case = next(case for case in family.CASES if case.name == "phi3")
    write_family_gguf(tmp_path / "m.gguf", family.checkpoint("phi3"), KINDS.F32, lean=True)
    assert any("names no sliding window" in note for note in opened(tmp_path, case).notes)


def dequantised_types():
    """Kinds that the package can dequantise, plain ones apart."""
    found = []
    for kind, (_, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return [kind for kind in found if kind.name not in reading.PLAIN_DTYPES]


@pytest.mark.parametrize("kind", dequantised_types(), ids=lambda kind: kind.name)
def test_every_kind_of_block_as_transformers_dequantises_it(tmp_path, kind):
    """Random blocks, 3 rows of 512; transformers' port is in torch, gguf's in numpy."""
    from transformers.integrations.gguf import dequant

    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (3, 512 // block * num_bytes), dtype=np.uint8)
    # No exponent of a scale may be all ones: that is no number.
    raw &= 0xBB
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(path).tensors
    stored = reading._stored(path, tensor, kind)
    values = stored.read()
    assert values.shape == stored.meta.shape == (3, 512)
    assert values.dtype == torch.float32
    if int(kind) not in dequant._DEQUANT:
        assert kind.name in ("Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"), (
            "transformers has no port of it"
        )
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    else:
        packed = map_tensor(path, int(tensor.data_offset), (int(tensor.n_bytes),), torch.uint8).view(3, -1)
        expected = dequant.dequantize(packed, int(kind), torch.float32).reshape(3, 512)
    assert torch.isfinite(expected).all()
    assert torch.equal(values, expected)
