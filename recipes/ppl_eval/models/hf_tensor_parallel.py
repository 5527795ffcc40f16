"""How a transformers' model is divided among ranks: its own ``tp_plan``, read as a layout.

A plan names modules by pattern and says how each is split. What is taken from it is which linear layers keep
some outputs and which some inputs; embedding and head are split by vocabulary whatever the plan says of
them. The splitting itself is ``parallel.tensor_parallel``'s.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ppl_eval.models.decoder import TensorParallelLayout

_REPLICATED = ("replicated", "replicated_with_grad_allreduce")
# Style in a plan -> list of the layout.
_STYLES = {
    "colwise": "split_outputs",
    "rowwise": "split_inputs",
    "colwise_gather_output": "gathered_outputs",
    "rowwise_split_input": "sliced_inputs",
}


@dataclass
class _Found:
    """What a plan says of one model: names of linear layers by list of the layout, and modules left whole."""

    split_outputs: list[str] = field(default_factory=list)
    split_inputs: list[str] = field(default_factory=list)
    gathered_outputs: list[str] = field(default_factory=list)
    sliced_inputs: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


def layout(model: Any, ends: tuple[str, str]) -> TensorParallelLayout:
    """Return how a model's layers are divided.

    Args:
        model: the ``...ForCausalLM``.
        ends: names of the embedding and the head.

    Raises:
        ValueError: if ``why_not`` has a reason.
    """
    found = _read(model, ends)
    if isinstance(found, str):
        raise ValueError(found)
    sizes: dict[str, set[int]] = {}
    config = model.config.get_text_config()
    for name in (*found.split_outputs, *found.gathered_outputs):
        width = model.get_submodule(name).out_features
        if name in found.split_outputs and _is_attention(name):
            heads = int(config.num_attention_heads)
            sizes["heads"] = {heads}
            sizes["key-value heads"] = {int(getattr(config, "num_key_value_heads", None) or heads)}
        else:
            sizes.setdefault(f"outputs of {name.rpartition('.')[2]}", set()).add(width)
    for name in (*found.split_inputs, *found.sliced_inputs):
        width = model.get_submodule(name).in_features
        sizes.setdefault(f"inputs of {name.rpartition('.')[2]}", set()).add(width)

    def shrink(num_ranks: int) -> None:
        """Layers count heads by the width of what they are given; torch would look for the padding's row."""
        model.get_submodule(ends[0]).padding_idx = None

    return TensorParallelLayout(
        found.split_outputs,
        found.split_inputs,
        sizes,
        shrink,
        gathered_outputs=found.gathered_outputs,
        sliced_inputs=found.sliced_inputs,
    )


def why_not(model: Any, ends: tuple[str, str]) -> str | None:
    """Return why a model cannot be divided by its plan; None if it can."""
    found = _read(model, ends)
    return found if isinstance(found, str) else None


def _read(model: Any, ends: tuple[str, str]) -> _Found | str:
    kind = type(model).__name__
    plan: Mapping[str, str] = model.tp_plan or {}
    if not plan:
        return f"a {kind}, which has no plan in transformers"
    found = _Found()
    parts = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for name, part in parts.items():
        style = _style_of(plan, name)
        if style is None or name in ends:
            continue
        if style in _REPLICATED:
            found.whole.append(name)
        elif style in _STYLES and isinstance(part, nn.Linear):
            getattr(found, _STYLES[style]).append(name)
        else:
            return f"a {kind}, whose plan splits {name} as {style}, which is not known here"
    if not found.split_inputs and not found.sliced_inputs:
        return f"a {kind}, whose plan in transformers splits no layer"
    left = next(_unsplit(model, found), None)
    if left is not None:
        return f"a {kind}, whose plan does not say how {left} is split, which lies between split layers"
    return found


def _style_of(plan: Mapping[str, str], name: str) -> str | None:
    # transformers' patterns have `*` for a layer's number.
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _unsplit(model: Any, found: _Found) -> Iterator[str]:
    """Walk parameters beside layers that keep some outputs: they see a part of what they were made for."""
    known = {*found.split_outputs, *found.split_inputs, *found.whole}
    for parent in sorted({name.rpartition(".")[0] for name in found.split_outputs}):
        for name, _ in model.get_submodule(parent).named_parameters():
            module = f"{parent}.{name}".rpartition(".")[0]
            if module not in known:
                yield f"{parent}.{name}"


def _is_attention(name: str) -> bool:
    return "attn" in name or "attention" in name
