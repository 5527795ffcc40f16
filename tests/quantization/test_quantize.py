"""Each scheme quantises what it fits, says what it left, and comes back from disk with the same bits."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torchtune.models.llama2 import llama2

from helpers import tiny_checkpoints as tiny
from helpers.models import on_meta
from ppl_eval.checkpoints.lazy_state_dict import load_into
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.checkpoints.quantized_tensors import is_quantized, layout_names, stored_bytes
from ppl_eval.models.engines import scorable
from ppl_eval.quantization.quantize import Packing, digest, quantize

TORCHTUNE = "torchtune.training.quantization."
INT4 = {"_component_": TORCHTUNE + "Int4WeightOnlyQuantizer", "groupsize": 32}
AWQ = {"_component_": "ppl_eval.quantization.awq", "groupsize": 32, "num_steps": 5}
# section, relative error of a layer's output that is just allowed
SCHEMES = {
    "int4": (INT4, 0.12),
    "int4-hqq": (
        {"_component_": "torchao.quantization.Int4WeightOnlyConfig", "group_size": 32, "use_hqq": True},
        0.12,
    ),
    "8da4w": ({"_component_": TORCHTUNE + "Int8DynActInt4WeightQuantizer", "groupsize": 32}, 0.12),
    "int8": ({"_component_": "torchao.quantization.Int8WeightOnlyConfig"}, 0.012),
    "8da8w": ({"_component_": "torchao.quantization.Int8DynamicActivationInt8WeightConfig"}, 0.03),
    "float8": ({"_component_": "torchao.quantization.Float8WeightOnlyConfig"}, 0.04),
    "awq": (AWQ, 0.12),
}


def calibration():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, tiny.VOCAB, (1, 48), generator=generator) for _ in range(2)]


def make(build=tiny.tied, dtype=torch.bfloat16):
    return tiny.reference(build, tiny.random_weights(build, dtype)).requires_grad_(False)


def quantize_tiny(model, section):
    return quantize(
        model, section, "cpu", batches=calibration() if section["_component_"] == AWQ["_component_"] else None
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme_quantises_and_comes_back_with_the_same_bits(tmp_path, scheme, dtype):
    section, allowed = SCHEMES[scheme]
    model = make(dtype=dtype)
    full, full_bytes = dict(model.state_dict()), stored_bytes(model)
    report = quantize_tiny(model, section)
    rounded = tiny.logits(model)
    for name, _ in report.quantized:
        linear = model.get_submodule(name)
        x = torch.randn(16, linear.in_features, generator=torch.Generator().manual_seed(5)).to(dtype)
        exact = nn.functional.linear(x, full[f"{name}.weight"])
        assert 0 < float((linear(x) - exact).norm() / exact.norm()) < allowed, name
    assert len(report.quantized) == 7 * tiny.LAYERS
    assert report.skipped == [("output", "tied to the embedding, which stays in full precision")]
    assert report.weight_bytes == stored_bytes(model) < full_bytes
    # As `tune run quantize` writes it, and as it is read.
    opened = load_state_dict(tiny.write_tune(tmp_path, model.state_dict()))
    assert opened.quantized
    again = on_meta(tiny.tied)
    load_into(again, opened.state_dict, dtype=dtype)
    assert torch.equal(tiny.logits(again), rounded)
    with pytest.raises(ValueError, match="quantised already"):
        quantize_tiny(again, section)


@pytest.mark.parametrize("groupsize", [32, 64, 128, 256])
def test_layers_that_do_not_fit_the_group_are_skipped_and_named(groupsize):
    model = make(tiny.untied)
    section = INT4 | {"groupsize": groupsize}
    if groupsize == 256:
        with pytest.raises(
            ValueError, match=r"fits no layer \(13 layers: in_features 64.*2 layers: in_features 128"
        ):
            quantize(model, section, "cpu")
        assert not any(is_quantized(p) for p in model.parameters())
        return
    report = quantize(model, section, "cpu")
    narrow = groupsize == 128
    assert [name for name, _ in report.quantized] == [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not (narrow and module.in_features == 64)
    ]
    assert len(report.skipped) == (13 if narrow else 0)
    assert all(reason == "in_features 64 is no multiple of group size 128" for _, reason in report.skipped)
    for name, _ in report.quantized:
        assert is_quantized(model.get_submodule(name).weight)


def test_rows_that_the_cpu_kernel_cannot_pack_are_skipped():
    sizes = {"num_layers": 1, "num_heads": 24, "num_kv_heads": 3, "embed_dim": 192, "intermediate_dim": 64}
    model = llama2(vocab_size=32, max_seq_len=8, **sizes).requires_grad_(False)
    report = quantize(model, INT4, "cpu")
    reason = "out_features 24 is no multiple of 16 (CPU int4 kernel)"
    assert report.skipped == [(f"layers.0.attn.{name}", reason) for name in ("k_proj", "v_proj")]


def test_qat_quantisers_are_refused_with_the_right_one():
    for name, right in (
        ("Int4WeightOnlyQATQuantizer", "Int4WeightOnlyQuantizer"),
        ("Int8DynActInt4WeightQATQuantizer", "Int8DynActInt4WeightQuantizer"),
        ("Int8DynActInt4WeightQATQuantizerModuleSwap", "Int8DynActInt4WeightQuantizer"),
    ):
        with pytest.raises(ValueError, match=rf"prepares a model for training.*quantization\.{right} and"):
            quantize(make(), {"_component_": TORCHTUNE + name}, "cpu")


def test_mistakes_in_the_section_are_named():
    for section, told in (
        (
            {"_component_": TORCHTUNE + "Int3Quantizer"},
            "can be torchtune.training.quantization.Int4WeightOnlyQuantizer",
        ),
        (INT4 | {"group_siez": 32}, r"unknown keys \['group_siez'\]; .* takes groupsize"),
        (INT4 | {"groupsize": 100}, "group size is 100; it can be 32, 64, 128, 256"),
        (AWQ, r"quantizer\.calibration is missing"),
    ):
        with pytest.raises(ValueError, match=told):
            quantize(make(), section, "cpu")
    with pytest.raises(ValueError, match="gives not one window"):
        quantize(make(), AWQ, "cpu", batches=[])


def test_a_scheme_that_the_device_cannot_run_says_so_before_touching_weights():
    model = make(dtype=torch.float64)
    before = tiny.logits(model)
    with pytest.raises(ValueError, match="does not work on cpu in fp64"):
        quantize(model, INT4, "cpu")
    assert torch.equal(tiny.logits(model), before)


def test_quantisation_does_not_touch_process_wide_settings():
    before = torch.get_float32_matmul_precision()
    for section, _ in SCHEMES.values():
        quantize_tiny(make(), section)
    assert torch.get_float32_matmul_precision() == before == "highest"


def skewed(build=tiny.untied):
    """A model whose layers get a few large input columns, as trained models do: what AWQ is for."""
    weights = tiny.random_weights(build, torch.float32)
    for name, weight in weights.items():
        if name.endswith("norm.scale"):
            weight[::16] *= 12
    return tiny.reference(build, weights).requires_grad_(False)


def test_awq_changes_the_output_less_than_plain_int4():
    exact = tiny.logits(skewed())

    def error(section):
        model = skewed()
        quantize_tiny(model, section)
        return float((tiny.logits(model) - exact).norm() / exact.norm())

    plain, calibrated = error(INT4 | {"groupsize": 64}), error(AWQ | {"groupsize": 64, "num_steps": 20})
    assert calibrated < 0.8 * plain, (calibrated, plain)


def test_awq_equals_torchaos_own_flow():
    from torchao.dtypes import Int4CPULayout
    from torchao.prototype.awq import AWQConfig, AWQStep
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    ours, theirs = skewed(tiny.tied), skewed(tiny.tied)
    quantize_tiny(ours, AWQ)
    base = Int4WeightOnlyConfig(group_size=32, layout=Int4CPULayout(), set_inductor_config=False)
    quantize_(theirs, AWQConfig(base, AWQStep.PREPARE, 5), lambda module, _: isinstance(module, nn.Linear))
    with torch.no_grad():
        for tokens_BT in calibration():
            theirs(tokens_BT)
    quantize_(theirs, AWQConfig(base, AWQStep.CONVERT, 5))
    assert torch.equal(tiny.logits(ours), tiny.logits(theirs))
    assert digest(ours) == digest(theirs)


def test_awq_takes_what_is_shared_over_what_it_would_find():
    """Ranks agree because each search is one rank's and its result is everybody's."""
    asked = []

    def elsewhere(index, like, compute):
        asked.append((index, like.shape, like.dtype))
        return torch.full_like(like, 2.0)

    model, other = make(), make()
    report = quantize(model, AWQ, "cpu", batches=calibration(), share=elsewhere)
    assert [index for index, _, _ in asked] == list(range(7 * tiny.LAYERS))
    assert all(
        torch.equal(p.scale, torch.full_like(p.scale, 2.0)) for p in model.parameters() if hasattr(p, "scale")
    )
    assert report.digest == digest(model) != quantize(other, AWQ, "cpu", batches=calibration()).digest


def test_checkpoint_for_another_dtype_or_device_is_refused_with_the_way_out(tmp_path):
    model = make()
    quantize(model, INT4, "cpu")
    section = tiny.write_tune(tmp_path, model.state_dict())
    assert "Int4CPULayout" in layout_names(next(p for p in model.parameters() if is_quantized(p)))
    with pytest.raises(ValueError, match=r"quantised for bf16 activations: set dtype=bf16"):
        load_into(on_meta(tiny.tied), load_state_dict(section).state_dict, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"packed for cpu .*Int4CPULayout.*device=cpu.*ppl-eval quantize"):
        load_into(
            on_meta(tiny.tied), load_state_dict(section).state_dict, dtype=torch.bfloat16, device="cuda"
        )


def test_cuda_packing_is_refused_on_cpu(tmp_path):
    """The file is as a GPU writes it; only the packed numbers are made up, since packing needs the GPU."""
    from torchao.dtypes import AffineQuantizedTensor, TensorCoreTiledLayout
    from torchao.dtypes.uintx.tensor_core_tiled_layout import TensorCoreTiledAQTTensorImpl
    from torchao.quantization.quant_primitives import ZeroPointDomain

    packed = torch.zeros(8, 1, 32, 4, dtype=torch.int32)
    scales = torch.ones(2, 64, 2, dtype=torch.bfloat16)
    impl = TensorCoreTiledAQTTensorImpl(packed, scales, False, TensorCoreTiledLayout(8))
    weight = AffineQuantizedTensor(
        impl,
        (1, 32),
        (64, 64),
        quant_min=0,
        quant_max=15,
        zero_point_domain=ZeroPointDomain.FLOAT,
        dtype=torch.bfloat16,
    )
    weights = tiny.random_weights(tiny.tied) | {"layers.0.attn.q_proj.weight": weight}
    opened = load_state_dict(tiny.write_tune(tmp_path, weights))
    with pytest.raises(
        ValueError, match=r"packed for cuda .*q_proj.*TensorCoreTiledLayout.*the run is on cpu"
    ):
        load_into(on_meta(tiny.tied), opened.state_dict, dtype=torch.bfloat16)


def test_adapter_on_quantised_weights_is_refused(tmp_path):
    model = make()
    quantize(model, INT4, "cpu")
    section = tiny.write_tune(tmp_path, model.state_dict())
    torch.save({"x": torch.ones(1)}, tmp_path / "adapter_model.pt")
    with pytest.raises(ValueError, match="merge first, then quantise"):
        load_state_dict(section | {"adapter_checkpoint": "adapter_model.pt"})


@pytest.mark.parametrize("kind", ["Int4WeightOnly", "Int8DynActInt4Weight"])
def test_a_qat_trained_checkpoint_is_what_its_training_saw(kind):
    """Fake-quantised outputs of the training model against those of its weights under the matching
    quantiser."""
    from torchtune.training import quantization

    torch.manual_seed(0)
    # torchao's int4 training layers come in widths of 1024 only.
    sizes = {"num_layers": 1, "num_heads": 8, "num_kv_heads": 8, "embed_dim": 1024, "intermediate_dim": 1024}
    plain = llama2(vocab_size=32, max_seq_len=8, **sizes).to(torch.bfloat16)
    x = torch.arange(8)[None]
    trained = getattr(quantization, f"{kind}QATQuantizer")(groupsize=32).prepare(copy.deepcopy(plain))
    assert set(trained.state_dict()) == set(plain.state_dict())
    plain.load_state_dict(trained.state_dict())
    unrounded, seen = plain(x), trained(x)
    section = {"_component_": f"{TORCHTUNE}{kind}Quantizer", "groupsize": 32}
    quantize(plain.requires_grad_(False), section, "cpu")

    def distance(other):
        return float((other - seen).norm() / seen.norm())

    assert distance(plain(x)) < 0.1 * distance(unrounded)


def test_what_torchtunes_own_quantiser_writes_is_read_and_has_our_bits(tmp_path):
    from torchtune.training.quantization import Int8DynActInt4WeightQuantizer

    theirs, ours = make(), make()
    precision = torch.get_float32_matmul_precision()
    try:
        theirs = Int8DynActInt4WeightQuantizer(groupsize=32).quantize(theirs)
    finally:
        torch.set_float32_matmul_precision(precision)  # it changes the process's
    opened = load_state_dict(tiny.write_tune(tmp_path, theirs.state_dict()))
    again = on_meta(tiny.tied)
    load_into(again, opened.state_dict, dtype=torch.bfloat16)
    quantize(ours, SCHEMES["8da4w"][0], "cpu")
    assert torch.equal(tiny.logits(again), tiny.logits(ours))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "awq"])
def test_weights_are_quantised_while_they_are_read(tmp_path, scheme):
    """The bits of quantising afterwards, and no more than one weight in full precision at a time."""
    section, _ = SCHEMES[scheme]
    whole = make()
    opened = load_state_dict(tiny.write_tune(tmp_path, whole.state_dict()))
    quantize_tiny(whole, section)
    decoder = on_meta(tiny.tied)
    packing = Packing(scorable(decoder), section, torch.device("cpu"), torch.bfloat16)
    full, most = weakref.WeakSet(), 0

    def pack(name, weight):
        nonlocal most
        # A copy, as on another device; the mapped file is no memory.
        weight = weight.clone()
        if name.endswith("proj.weight") or ".mlp." in name:
            full.add(weight)
        most = max(most, len(full))
        return packing(name, weight)

    load_into(decoder, opened.state_dict, dtype=torch.bfloat16, pack=pack)
    report = packing.report()
    assert most == 1
    assert report.weight_bytes == stored_bytes(decoder) == stored_bytes(whole)
    assert torch.equal(tiny.logits(decoder), tiny.logits(whole))
