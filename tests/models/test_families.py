"""Every family's torchtune model, corrected, gives transformers' probability to every token."""

import re

import numpy as np
import pytest
import torch
from torchtune.config._utils import _get_component_from_path
from torchtune.modules import TransformerSelfAttentionLayer

from helpers.family_models import (
    BUILDERS,
    CASES,
    LONG,
    SHORT,
    WINDOW,
    build,
    checkpoint,
    torchtune_nll,
    transformers_nll,
)
from helpers.published import PUBLISHED
from ppl_eval.models import attention
from ppl_eval.models import corrections as family_corrections
from ppl_eval.models.config_check import check_config
from ppl_eval.models.families import architecture_of, correct, family_of

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def error_without(case, num_inputs, mend) -> float:
    """Largest error of a token's NLL, in nats, against transformers when only `mend` is done to the model."""
    folder = checkpoint(case.name)
    expected = transformers_nll(folder, num_inputs, torch.float64)
    model, _, _ = build(case, folder, torch.float64, mend=mend)
    actual = torchtune_nll(model, num_inputs, torch.float64)
    error = np.abs(actual - expected).max()
    print(f"\n{case.name} at {num_inputs} inputs: a token's NLL off by up to {error:.2g} nats, ", end="")
    print(f"their sum by {actual.sum() / expected.sum() - 1:+.1%}")
    return error


def all_but(*dropped):
    """`correct` without some of the corrections."""

    def mend(model, builder, config):
        kept = [step for step in family_of(builder).corrections if step not in dropped]
        model.final_logit_softcap = None
        facts = architecture_of(config).facts(config)
        return [note for step in kept for note in step(model, builder, facts)]

    return mend


@every_case
@pytest.mark.parametrize("num_inputs", [SHORT, LONG])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-12)], ids=str)
def test_parity(case, num_inputs, dtype, tolerance):
    folder = checkpoint(case.name)
    expected = transformers_nll(folder, num_inputs, dtype)
    model, config, _ = build(case, folder, dtype)
    assert check_config(model, BUILDERS[case.family], config) == []
    actual = torchtune_nll(model, num_inputs, dtype)
    assert expected.dtype == actual.dtype
    assert expected.std() > 1  # far from uniform: a wrong model would be seen
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    assert actual.sum(dtype=np.float64) == pytest.approx(expected.sum(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "num_inputs", "dropped"),
    [
        ("mistral", LONG, family_corrections.sliding_windows),
        ("phi3", LONG, family_corrections.sliding_windows),
        ("qwen2_window", LONG, family_corrections.sliding_windows),
        ("phi3_partial", SHORT, family_corrections.phi3_rotary),
        ("phi3_longrope", SHORT, family_corrections.phi3_rotary),
        ("phi3_longrope", LONG, family_corrections.phi3_rotary),
        ("gemma2", SHORT, family_corrections.gemma2_final_softcap),
        ("gemma2", SHORT, family_corrections.gemma2_layers),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_without_the_correction_the_error_is_large(name, num_inputs, dropped):
    assert error_without(BY_NAME[name], num_inputs, all_but(dropped)) > 1


def test_swapped_gemma2_norms_alone_are_a_large_error(monkeypatch):
    monkeypatch.setattr(family_corrections.Gemma2Layer, "forward", TransformerSelfAttentionLayer.forward)
    assert error_without(BY_NAME["gemma2"], SHORT, correct) > 1


def test_swapped_gemma2_caps_alone_are_a_large_error():
    case = BY_NAME["gemma2"]
    folder = checkpoint(case.name)
    model, config, _ = build(case, folder, hidden_capping_value=7.0, final_capping_value=5.0)
    keys = [difference.key for difference in check_config(model, "torchtune.models.gemma2.gemma2", config)]
    assert keys == ["attn_logit_softcapping", "final_logit_softcapping"]
    expected = transformers_nll(folder, SHORT, torch.float32)
    error = np.abs(torchtune_nll(model, SHORT, torch.float32) - expected)
    print(f"\ngemma2 with its caps swapped: a token's NLL off by up to {error.max():.2g} nats")
    assert error.max() > 1


def test_a_window_changes_nothing_within_it():
    drop = all_but(family_corrections.sliding_windows)
    assert error_without(BY_NAME["mistral"], WINDOW, drop) < 1e-9
    assert error_without(BY_NAME["mistral"], WINDOW + 1, drop) > 1e-3


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen2_window"])
def test_parity_over_several_blocks_of_queries(name, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 13)
    assert error_without(BY_NAME[name], LONG, correct) < 1e-9


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_equals_the_formula(softcap, window, masked, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 19, 8, dtype=torch.float64, generator=random)
    position = torch.arange(19)
    seen = position[None, :] <= position[:, None]
    mask = None
    if masked:  # two documents packed into one row, cut at another place in each row
        document = torch.stack([position < 7, position < 12])
        mask = seen & (document[:, :, None] == document[:, None, :])
    if window is not None:
        seen = seen & (position[None, :] > position[:, None] - window)
    allowed = seen[None, None] if mask is None else (seen & mask)[:, None]
    scores = q @ k.mT * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = torch.softmax(scores.masked_fill(~allowed, -torch.inf).float(), -1).double() @ v
    options = {"window": window, "softcap": softcap, "scale": 0.7}
    actual = attention.attend(q, k, v, mask, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    if not masked:  # the last queries alone, as a rank of a split sequence has them
        part = attention.attend(q[:, :, 11:], k, v, query_offset=11, **options)
        torch.testing.assert_close(part, actual[:, :, 11:], rtol=0, atol=1e-6)


def test_attend_refuses_a_mask_it_cannot_combine():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=re.escape("dataset.packed=False")):
        attention.attend(q, q, q, mask=object(), window=1)


@every_case
def test_correcting_twice_changes_nothing_more_and_no_parameter_name(case):
    model, config, _ = build(case, checkpoint(case.name), mend=lambda *_: [])
    names = list(model.state_dict())
    correct(model, BUILDERS[case.family], config)
    once = torchtune_nll(model, LONG, torch.float32)
    correct(model, BUILDERS[case.family], config)
    assert list(model.state_dict()) == names
    np.testing.assert_array_equal(torchtune_nll(model, LONG, torch.float32), once)


def test_windows_and_caps_are_marked_for_scorer_and_split():
    gemma2, _, notes = build(BY_NAME["gemma2"], checkpoint("gemma2"))
    assert gemma2.final_logit_softcap == 7.0
    assert [layer.attn.sliding_window for layer in gemma2.layers] == [WINDOW, None, WINDOW, None]
    assert len(notes) == 3
    llama, _, notes = build(BY_NAME["llama3"], checkpoint("llama3"))
    assert llama.final_logit_softcap is None
    assert [layer.attn.sliding_window for layer in llama.layers] == [None, None, None]
    assert notes == []


def test_without_config_json_the_ignored_window_is_told():
    with torch.device("meta"):
        model = _get_component_from_path("torchtune.models.mistral.mistral_7b")()
    (note,) = correct(model, "torchtune.models.mistral.mistral_7b", None)
    assert "no config.json, so no sliding window is applied" in note


@pytest.mark.parametrize("builder", PUBLISHED)
def test_builders_against_published_constants(builder):
    """torchtune's own constants: right once corrected, and wrong before only where it is known."""
    path, published = f"torchtune.models.{builder}", PUBLISHED[builder]
    with torch.device("meta"):
        model = _get_component_from_path(path)()
    assert sum(parameter.numel() for parameter in model.parameters()) == published.num_parameters
    before = {difference.key for difference in check_config(model, path, published.config)}
    known = {
        "gemma2": {"attn_logit_softcapping", "final_logit_softcapping", "feed-forward norms"},
        "mistral": {"sliding_window"},
        "phi3": {"sliding_window"},
        "phi4": {"rope_theta"},
    }
    assert before == known.get(builder.partition(".")[0], set())
    correct(model, path, published.config)
    assert check_config(model, path, published.config) == []
