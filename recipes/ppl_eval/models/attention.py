"""Causal attention with what torchtune's own call lacks: a sliding window, a score cap, another scale.

``scaled_dot_product_attention`` can express a window only by a T x T mask and a score cap not at all. Both
are done here in blocks of queries, so that memory grows with T and not with its square.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from ppl_eval.models import cpu_attention

# Queries handled at once where a mask or a score matrix must be written out. The constant is part of the
# result's bits: a block's shape decides which kernel runs.
QUERY_BLOCK = 256


def attend(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    mask: Any = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    query_offset: int = 0,
    queries_per_key: int = 1,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend like torchtune's ``MultiHeadAttention._attention_call``, whose place it takes.

    Query t stands at position t + query_offset of the keys. It sees the keys that ``mask`` allows (without a
    mask: those not after it) and, with a window w, of these only the last w: key j is seen if j > t +
    query_offset - w. That is transformers' meaning of ``sliding_window``.

    Args:
        q_BHTD: queries; B batch, H heads, T queries, D head size.
        k_BHSD: keys, already repeated for grouped queries; S keys.
        v_BHSD: values, shaped like the keys.
        mask: boolean [B, T, S], True where a query sees a key, or None for causal.
        dropout_p: must be 0: scoring has no dropout.
        is_causal: torchtune's flag; without a mask it must be True.
        window: number of keys a query sees, itself included; None for all.
        softcap: scores become softcap * tanh(score / softcap) before the softmax (Gemma 2).
        scale: factor on the scores; None for D ** -0.5.
        query_offset: number of keys before the first query, when queries are a part of the sequence.
        queries_per_key: heads in a row that have the same keys and values, which may save work.
        sinks_H: scores of a key without a value that every query of a head sees too (gpt-oss); None for none.

    Returns:
        The attended values, [B, H, T, D].

    Raises:
        ValueError: if the mask is a flex-attention BlockMask, which can carry neither a window nor a cap.
    """
    assert dropout_p == 0.0
    assert mask is not None or is_causal
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"a {type(mask).__name__} cannot be combined with this attention, whose masks are plain tensors;"
            " use dataset.packed=False"
        )
    num_queries, num_keys = q_BHTD.shape[2], k_BHSD.shape[2]
    whole = mask is None and query_offset == 0 and num_queries == num_keys
    constants: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale}
    if whole and sinks_H is None and q_BHTD.device.type == "cpu":
        return _attend_on_cpu(q_BHTD, k_BHSD, v_BHSD, queries_per_key, **constants)
    if window is not None and window >= num_keys:
        constants["window"] = window = None
    if whole and softcap is None and window is None and sinks_H is None:
        return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, is_causal=True, scale=scale)
    cuts = [(begin, begin + QUERY_BLOCK) for begin in range(0, num_queries, QUERY_BLOCK)]
    constants |= {"query_offset": query_offset, "sinks_H": sinks_H}
    return _attend_in_blocks(q_BHTD, k_BHSD, v_BHSD, mask, cuts, **constants)


def _attend_on_cpu(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    queries_per_key: int,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> Tensor:
    """Attend over a whole sequence with the same bits for a position whatever comes after it."""
    if softcap is None and cpu_attention.is_faster(q_BHTD):
        return cpu_attention.causal(q_BHTD, k_BHTD, v_BHTD, scale, queries_per_key, window=window)
    if softcap is None:
        return cpu_attention.merged(q_BHTD, k_BHTD, v_BHTD, scale, window)
    num_positions = q_BHTD.shape[2]
    cuts = list(cpu_attention.blocks(num_positions))
    q, k, v = (cpu_attention.filled(x_BHTD, cuts[-1][1]) for x_BHTD in (q_BHTD, k_BHTD, v_BHTD))
    out_BHTD = _attend_in_blocks(
        q, k, v, None, cuts, window=window, softcap=softcap, scale=scale, query_offset=0
    )
    return out_BHTD[:, :, :num_positions]


def _attend_in_blocks(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    mask: Tensor | None,
    cuts: Sequence[tuple[int, int]],
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    query_offset: int,
    sinks_H: Tensor | None = None,
) -> Tensor:
    num_queries, num_keys = q_BHTD.shape[2], k_BHSD.shape[2]
    blocks = []
    for begin, end in cuts:
        queries = slice(begin, min(end, num_queries))
        first_key = 0 if window is None else max(0, query_offset + begin - window + 1)
        last_key = num_keys if mask is not None else min(num_keys, query_offset + queries.stop)
        keys = slice(first_key, last_key)
        seen = _seen(queries, keys, mask, window=window, query_offset=query_offset, device=q_BHTD.device)
        q, k, v = q_BHTD[:, :, queries], k_BHSD[:, :, keys], v_BHSD[:, :, keys]
        if softcap is None and sinks_H is None:
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))
        else:
            blocks.append(_by_scores(q, k, v, seen, sinks_H, softcap=softcap, scale=scale))
    return torch.cat(blocks, dim=2)


def _seen(
    queries: slice,
    keys: slice,
    mask_BTS: Tensor | None,
    *,
    window: int | None,
    query_offset: int,
    device: torch.device,
) -> Tensor:
    """Return which of some keys some queries see: boolean, [1 or B, 1, queries, keys]."""
    query_T1 = torch.arange(queries.start, queries.stop, device=device)[:, None] + query_offset
    key_1S = torch.arange(keys.start, keys.stop, device=device)[None, :]
    seen_TS = key_1S <= query_T1 if mask_BTS is None else torch.ones_like(key_1S <= query_T1)
    if window is not None:
        seen_TS = seen_TS & (key_1S > query_T1 - window)
    if mask_BTS is None:
        return seen_TS[None, None]
    return seen_TS & mask_BTS[:, None, queries, keys]


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    sinks_H: Tensor | None,
    *,
    softcap: float | None,
    scale: float | None,
) -> Tensor:
    """Attend with scores written out, as transformers' eager Gemma 2 and gpt-oss do; softmax in float32."""
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # The lowest finite number: a query that sees nothing (padding of a packed sample) must not turn into NaN.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = F.softmax(scores.float(), dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


class NormedAttention(MultiHeadAttention):
    """Attention that normalises queries and keys before it turns them by their positions.

    torchtune's own does so afterwards, which is another function: a norm's weights differ between channels
    that the rotation mixes.

    Args:
        whole_width: norms go over all heads together (OLMo 2) and not over each (Qwen 3, Gemma 3).
        parts: what torchtune's takes; ``q_norm`` and ``k_norm`` are needed.
    """

    def __init__(self, *, whole_width: bool, **parts: Any) -> None:
        super().__init__(**parts)
        self.whole_width = whole_width

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Attend from x [B, T, D] to itself; y is x, by torchtune's layers."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.whole_width:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BTHD, k_BTHD, v_BTHD = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if not self.whole_width:
            q_BTHD, k_BTHD = self.q_norm(q_BTHD), self.k_norm(k_BTHD)
        if self.pos_embeddings is not None:
            q_BTHD, k_BTHD = (self.pos_embeddings(part, input_pos=input_pos) for part in (q_BTHD, k_BTHD))
        group = self.num_heads // self.num_kv_heads
        k_BHTD, v_BHTD = (_repeated(part.transpose(1, 2), group) for part in (k_BTHD, v_BTHD))
        out_BHTD = self._attention_call(
            q_BTHD.transpose(1, 2), k_BHTD, v_BHTD, mask=mask, dropout_p=0.0, is_causal=mask is None
        )
        return self.output_proj(out_BHTD.transpose(1, 2).flatten(2))


def _repeated(x_BHTD: Tensor, group: int) -> Tensor:
    return x_BHTD if group == 1 else x_BHTD.repeat_interleave(group, dim=1)


# Those whose score function is `_attention_call`, which `install` and context parallelism replace.
KINDS = (MultiHeadAttention, NormedAttention)


def install(
    attn: MultiHeadAttention, *, window: int | None, softcap: float | None = None, scale: float | None = None
) -> None:
    """Make a torchtune ``MultiHeadAttention`` attend through ``attend`` with these constants.

    ``attn.sliding_window`` is set too, so that a split of the sequence over ranks can see it.
    """
    queries_per_key = attn.num_heads // attn.num_kv_heads
    call: Any = partial(attend, window=window, softcap=softcap, scale=scale, queries_per_key=queries_per_key)
    attn._attention_call = call
    attn.sliding_window = window


def installed(attn: nn.Module) -> Mapping[str, Any]:
    """Return the window, softcap and scale that ``install`` gave to this attention; None without it."""
    call = getattr(attn, "_attention_call", None)
    given = call.keywords if isinstance(call, partial) and call.func is attend else {}
    return {name: given.get(name) for name in ("window", "softcap", "scale")}


def install_everywhere(decoder: TransformerDecoder) -> None:
    """Make the layers that still attend through torchtune's own call use ``attend``."""
    for layer in decoder.layers:
        attn = layer.attn
        if type(attn) in KINDS and not isinstance(attn._attention_call, partial):
            install(attn, window=None)
