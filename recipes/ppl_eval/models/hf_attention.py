"""transformers' models attending through a function of ours: context parallelism for the second engine.

transformers looks attention up by name, once for the function that attends and once for the one that makes
masks. Both are registered here: the mask is left out, because a part of a sequence needs one of its own, and
the function is given window, cap, sinks and scale by the layer.
"""

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppl_eval.models.decoder import Attend

_COUNTER = itertools.count()
# What layers hand over beside queries, keys and values, and does not change what attention is here.
_WITHOUT_EFFECT = (
    *("dropout", "is_causal", "position_ids", "position_embeddings"),
    *("use_cache", "cache_position"),
)
# Relative to the length of all hidden states: what the order of roundings may do, through all layers.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.1
# Rotary embeddings that choose their frequencies by the length of the sequence.
_BY_LENGTH = ("dynamic", "longrope")


def why_not(model: Any, base: Any) -> str | None:
    """Return why a model cannot attend through a function of ours, as far as its code tells; None if it can.

    Args:
        model: the ``...ForCausalLM``.
        base: the part of it without the head.
    """
    kind = type(model).__name__
    if getattr(model, "_is_stateful", False):
        return f"a {kind}, which has recurrent layers, whose state runs through the whole sequence"
    if not hasattr(sys.modules[type(base).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"a {kind}, which does not attend through transformers' attention interface"
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return f"a {kind}, which takes no positions"
    if getattr(base.config.get_text_config(), "attention_chunk_size", None):
        return f"a {kind}, which attends in chunks (attention_chunk_size)"
    return None


class Interface:
    """A pair of functions under one name in transformers' tables of attentions and of masks.

    Args:
        config: the model's config, which holds the name of the attention in use.
        attend: what layers attend through.
    """

    def __init__(self, config: Any, attend: Attend) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self._config, self._function = config, attend
        self._own, self._name = str(config._attn_implementation), f"ppl_eval_{next(_COUNTER)}"
        # Windows of the masks that were asked for, and of the layers that attended.
        self._masked: set[int] = set()
        self._attended: set[int] = set()
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, self._mask)
        config._attn_implementation = self._name

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Have the layers attend as they did before, inside."""
        self._config._attn_implementation = self._own
        try:
            yield
        finally:
            self._config._attn_implementation = self._name

    def check_windows(self) -> None:
        """Check that layers attend with the windows that the model has masks for.

        Raises:
            ValueError: if one of the two has a window that the other has not.
        """
        if self._masked != self._attended:
            raise ValueError(
                f"the model masks windows of {sorted(self._masked)} tokens, and its layers attend with"
                f" {sorted(self._attended)}; context_parallel_dim cannot be used with it"
            )

    def _mask(self, *_: Any, local_size: int | None = None, use_vmap: bool = False, **__: Any) -> None:
        if use_vmap:
            raise ValueError("the model has masks of its own; context_parallel_dim cannot be used with it")
        if local_size is not None:
            self._masked.add(int(local_size))

    def _attend(
        self,
        module: nn.Module,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attend by the signature of transformers' functions; returns [B, T, H, D]."""
        unknown = [name for name, v in others.items() if v is not None and name not in _WITHOUT_EFFECT]
        if unknown or attention_mask is not None or others.get("is_causal") is False:
            what = ", ".join(unknown) or "a mask of its own"
            raise ValueError(
                f"a {type(module).__name__} attends with {what}; context_parallel_dim cannot be used with it"
            )
        if sliding_window is not None:
            self._attended.add(int(sliding_window))
        # Latent attention has narrower values than keys.
        narrower = k_BHTD.shape[-1] - v_BHTD.shape[-1]
        out_BHTD = self._function(
            q_BHTD,
            k_BHTD,
            F.pad(v_BHTD, (0, narrower)) if narrower else v_BHTD,
            window=sliding_window,
            softcap=softcap,
            scale=scaling,
            sinks_H=s_aux,
        )
        return out_BHTD[..., : v_BHTD.shape[-1]].transpose(1, 2).contiguous(), None


def check_difference(found_BTD: Tensor, expected_BTD: Tensor, dtype: torch.dtype) -> None:
    """Check hidden states of a part of a sequence against those of the model's own forward.

    Raises:
        ValueError: if they differ by more than rounding.
    """
    difference = (found_BTD - expected_BTD).float().norm() / expected_BTD.float().norm()
    if not difference <= _TOLERANCE.get(dtype, _TOLERANCE_HALF):
        raise ValueError(
            "a sequence in parts gives other hidden states than the model's own forward gives for the whole"
            f" (they differ by {float(difference):.1e} of their size): the model does something between"
            " positions that is not known here; set context_parallel_dim: 1"
        )


@contextmanager
def rotated_by_length(base: nn.Module, num_positions: int) -> Iterator[None]:
    """Have rotary embeddings that choose frequencies by the length of the sequence see the whole length,
    inside.

    Args:
        base: the model.
        num_positions: length of the sequence of which the model is given a part.
    """
    by_length = [module for module in base.modules() if _chooses_by_length(module)]

    def forward(module: Any, x: Tensor, position_ids: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, ...]:
        last = position_ids.new_full((len(position_ids), 1), num_positions - 1)
        found = type(module).forward(module, x, torch.cat([position_ids, last], dim=1), *args, **kw)
        return tuple(table[:, :-1] for table in found)

    for module in by_length:
        setattr(module, "forward", lambda *args, _module=module, **kw: forward(_module, *args, **kw))  # noqa: B010
    try:
        yield
    finally:
        for module in by_length:
            del module.forward


def _chooses_by_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _BY_LENGTH for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
