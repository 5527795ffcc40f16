"""What holds for every protocol, by property over random lengths; and a protocol of a user's own."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from helpers.windows import scored, scored_once, windows_of
from ppl_eval import protocols
from ppl_eval.config import own_code
from ppl_eval.config.components import instantiate
from ppl_eval.protocols.base import Protocol, Windows
from ppl_eval.protocols.plan import make_plan

BOS_ALL = st.sampled_from(["tokenizer", "always", "never", "each_window"])


@st.composite
def any_protocol(draw: st.DrawFn) -> Protocol:
    size = draw(st.integers(3, 12))
    inner = draw(st.integers(1, size))
    bos = draw(BOS_ALL)
    return draw(
        st.sampled_from(
            [
                protocols.disjoint(size, bos=bos),
                protocols.disjoint(size, keep_tail=True, bos=bos),
                protocols.strided(size, inner, bos=bos),
                protocols.rolling(size, inner, bos=bos),
                protocols.llama_cpp(size, bos="never" if bos == "each_window" else bos),
                protocols.llama_cpp(size).for_tokenizer(adds_bos=False),
                protocols.megatron(size, inner, bos=bos),
                protocols.per_sample(size, too_long="truncate", bos=bos),
                protocols.per_sample(size, too_long="window", bos=bos),
            ]
        )
    )


@settings(max_examples=300, deadline=None)
@given(any_protocol(), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_windows_keep_the_promises_of_every_protocol(protocol: Protocol, lengths: list[int]):
    length_D = np.array(lengths)
    if not protocol.num_windows(length_D).any():
        return
    windows = windows_of(protocol, *lengths)
    inside = length_D[windows.document]
    assert (windows.num_inputs <= protocol.max_seq_len).all(), "the model sees too much"
    assert (windows.num_inputs >= 1).all()
    assert (windows.num_targets >= 1).all(), "a window that scores nothing"
    # No context and no target of another document, and no target without context.
    assert (windows.start >= 0).all()
    assert (windows.stop <= inside).all()
    assert (windows.score_start >= windows.start + 1 - windows.prefix).all()
    # The closed formula and the windows agree, per document, and nothing is scored twice.
    pairs = [
        (document, position)
        for document, first, stop in zip(windows.document, windows.score_start, windows.stop, strict=True)
        for position in range(first, stop)
    ]
    assert len(pairs) == len(set(pairs)), "a target scored twice"
    per_document = np.bincount([document for document, _ in pairs], minlength=len(lengths))
    assert per_document.tolist() == protocol.num_targets(length_D).tolist()
    # A document's first token needs a prefix to be scored.
    assert protocol.prefix_rule or not any(position == 0 for _, position in pairs)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.data(), st.integers(1, 80))
def test_each_token_once(size: int, data: st.DataObject, length: int):
    inner = data.draw(st.integers(1, size))
    everything = list(range(length))
    if length > 1:
        assert scored_once(protocols.megatron(size, inner), length) == everything[1:]
        assert scored_once(protocols.per_sample(size, too_long="window"), length) == everything[1:]
        if inner < size:
            assert scored_once(protocols.strided(size, inner), length) == everything[1:]
    assert scored_once(protocols.rolling(size, inner), length) == everything
    assert scored_once(protocols.strided(size, inner, bos="each_window"), length) == everything
    assert scored_once(protocols.disjoint(size, keep_tail=True, bos="each_window"), length) == everything


@pytest.mark.parametrize(
    "protocol",
    [
        protocols.disjoint(4),
        protocols.disjoint(4, keep_tail=True),
        protocols.strided(4, 2),
        protocols.rolling(4),
        protocols.llama_cpp(4),
        protocols.megatron(4, 2),
        protocols.per_sample(10),
    ],
    ids=lambda protocol: protocol.name,
)
def test_windows_are_random_access(protocol: Protocol):
    plan = make_plan(protocol, np.array([0, 11, 11, 22, 29]), batch_size=3)
    one_by_one = [plan.windows(i, i + 1) for i in range(plan.num_windows)]
    together = plan.windows(0, plan.num_windows)
    for name in Windows._fields:
        column = np.concatenate([getattr(window, name) for window in one_by_one])
        assert column.tolist() == getattr(together, name).tolist()


@pytest.mark.parametrize("name", protocols.__all__)
def test_a_protocol_is_named_as_configs_name_it(name: str):
    arguments = {"max_seq_len": 8, **({"stride": 4} if name == "strided" else {})}
    node = OmegaConf.create({"_component_": f"ppl_eval.protocols.{name}", **arguments})
    protocol = instantiate("protocol", node)
    assert protocol.name == name
    assert protocol.parameters.items() >= arguments.items()
    # Importing the module of the same name must not put it in the place of the class.
    importlib.import_module(f"ppl_eval.protocols.{name}")
    assert getattr(protocols, name) is type(protocol)


# --- a protocol of a user's own ---------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "protocols.md"


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch) -> str:
    # The example of the documentation.
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "my_protocols.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own_code.allow(["my_protocols"])
    yield "my_protocols"
    own_code.allow([])
    sys.modules.pop("my_protocols", None)


def build(component: str, **arguments) -> Protocol:
    return instantiate("protocol", OmegaConf.create({"_component_": component, **arguments}))


def test_a_protocol_in_a_users_module(users_module: str):
    protocol = build(f"{users_module}.FirstTokens", max_seq_len=4, num_scored=2)
    # Everything that it does not define has a meaning.
    assert (protocol.name, protocol.join, protocol.bos) == ("first_tokens", None, "tokenizer")
    assert protocol.parameters == {"max_seq_len": 4, "num_scored": 2}
    assert (protocol.prefix_rule, protocol.denominator, protocol.covers_text) == (None, "scored tokens", True)
    assert protocol.for_tokenizer(adds_bos=True) is protocol
    assert scored(protocol, 11) == [[1, 2]]
    plan = make_plan(protocol, np.array([0, 11, 12, 14]), batch_size=2)
    assert plan.windows(0, 2).document.tolist() == [0, 2]
    assert plan.expected_targets() == 3
    assert plan.notes() == []


def test_arguments_of_a_users_protocol_are_checked(users_module: str):
    path = f"{users_module}.FirstTokens"
    with pytest.raises(
        ValueError, match=r"unknown key 'protocol.num_score': .* takes max_seq_len, num_scored;"
    ):
        build(path, max_seq_len=4, num_score=2)
    with pytest.raises(ValueError, match=r"the config has no protocol.max_seq_len, which .* needs"):
        build(path)
    with pytest.raises(ValueError, match=r"protocol.num_scored is 5; it must be a whole number from 1 to 4"):
        build(path, max_seq_len=4, num_scored=5)
    with pytest.raises(ValueError, match=r"protocol.max_seq_len is '4'"):
        build(path, max_seq_len="4")


def test_a_protocol_that_is_not_whole_is_refused():
    with pytest.raises(ValueError, match="abstract"):
        build("ppl_eval.protocols.base.Protocol", max_seq_len=4)
