"""Context parallelism: the sequence is split over the ``cp`` ranks, and keys and values travel.

The sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r: one early and one late, so
that all ranks have the same amount of causal attention to do. Every layer gathers keys and values, a few
heads at a time, and each rank attends from its own two chunks. Activations per rank fall with cp; the
gathered keys and values of the heads in hand are all that grows with the whole length.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from ppl_eval.models import attention
from ppl_eval.models.decoder import Decoder

# Gathered keys and values that exist at once, or those of one head where they are larger.
_MAX_GATHERED_BYTES = 64 * 2**20
# Tokens of each chunk of the sequence that a decoder checks itself on.
_PROBE_CHUNK = 8


def split_attention(decoder: Decoder, group: dist.ProcessGroup) -> None:
    """Make every layer attend over the whole sequence while this rank has only its part of it.

    Sliding windows, score caps and scales of the layers are kept.

    Args:
        decoder: the decoder, its family's corrections already applied.
        group: the ``cp`` ranks.

    Raises:
        ValueError: if the model cannot be split so.
    """
    reason = decoder.supports("cp")
    if reason is not None:
        raise ValueError(reason)
    decoder.set_attention(partial(attend_part, group=group))


def check_parts(decoder: Decoder, group: dist.ProcessGroup, device: torch.device) -> None:
    """Have a split decoder check itself on a short sequence; all ranks of the group call it.

    Raises:
        ValueError: see ``Decoder.check_parts``.
    """
    part = Part(_PROBE_CHUNK * 2 * group.size(), group, device)
    decoder.check_parts(part.position_T[None], part.num_positions)


def positions(num_positions: int, cp: int, rank: int) -> torch.Tensor:
    """Return positions [T'] of this rank's two chunks; those from ``num_positions`` on are padding, which
    makes the chunks equal.
    """
    chunk = -(-num_positions // (2 * cp))
    return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in _chunks(cp, rank)])


class Part:
    """This rank's part of a batch.

    Args:
        num_positions: length of the batch's sequences.
        group: the ``cp`` ranks.
        device: of the batch.
    """

    def __init__(self, num_positions: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.num_positions, self.group = num_positions, group
        position_T = positions(num_positions, group.size(), group.rank()).to(device)
        self.real_T = position_T < num_positions
        # Padding repeats the last token: causal attention hides it from all real ones, which come before it.
        self.position_T = position_T.clamp(max=num_positions - 1)

    def take(
        self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's tokens, labels (padding is not scored) and positions [1, T']."""
        labels = labels_BT[:, self.position_T].masked_fill(~self.real_T, CROSS_ENTROPY_IGNORE_IDX)
        return tokens_BT[:, self.position_T], labels, self.position_T[None]

    def join(self, values_KBT: torch.Tensor) -> torch.Tensor:
        """Join the values of all parts; every position is one rank's, so the sum adds only zeros to it.

        Args:
            values_KBT: this rank's values; float32.
        """
        whole = values_KBT.new_zeros(*values_KBT.shape[:-1], self.num_positions)
        whole[..., self.position_T[self.real_T]] = values_KBT[..., self.real_T]
        dist.all_reduce(whole, group=self.group)
        return whole


@torch.compiler.disable  # Nothing to fuse here, and a gather into a new buffer is not traced.
def attend_part(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from this rank's part of the sequence to all of it.

    Args:
        q_BHTD: this rank's queries; T is its two chunks.
        k_BHTD: this rank's keys; with fewer heads than the queries where these are grouped.
        v_BHTD: this rank's values, like the keys.
        group: the ``cp`` ranks.
        window: see ``attention.attend``.
        softcap: see ``attention.attend``.
        scale: see ``attention.attend``.
        sinks_H: see ``attention.attend``.
    """
    cp, chunk = group.size(), q_BHTD.shape[2] // 2
    queries_per_key = q_BHTD.shape[1] // k_BHTD.shape[1]
    kv = torch.stack([k_BHTD, v_BHTD])
    num_heads = kv.shape[2]
    heads_at_once = max(1, _MAX_GATHERED_BYTES * num_heads // (kv.nbytes * cp))
    out_BHTD = torch.empty_like(q_BHTD)
    for first in range(0, num_heads, heads_at_once):
        keys, values = _gather(kv[:, :, first : first + heads_at_once], group)
        for head in range(keys.shape[1]):
            queries = slice((first + head) * queries_per_key, (first + head + 1) * queries_per_key)
            for half, index in enumerate(_chunks(cp, group.rank())):
                part, stop = slice(half * chunk, (half + 1) * chunk), (index + 1) * chunk
                # Views without a copy: all queries of the group read the same keys.
                k, v = (
                    x[:, head : head + 1, :stop].expand(-1, queries_per_key, -1, -1) for x in (keys, values)
                )
                sinks = None if sinks_H is None else sinks_H[queries]
                out_BHTD[:, queries, part] = _attend_chunk(
                    *(q_BHTD[:, queries, part], k, v, sinks), window=window, softcap=softcap, scale=scale
                )
    return out_BHTD


def _attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_H: torch.Tensor | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend causally from the last queries of the keys' sequence."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if q.is_cuda and window is None and softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_lower_right(num_queries, num_keys), scale=scale
        )
    offset = num_keys - num_queries
    constants: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "sinks_H": sinks_H}
    return attention.attend(q, k, v, query_offset=offset, **constants)


def _gather(kv_2BHTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather keys and values of the whole padded sequence, in its order."""
    cp, chunk = group.size(), kv_2BHTD.shape[3] // 2
    parts = kv_2BHTD.new_empty(cp, *kv_2BHTD.shape)
    dist.all_gather_single(parts.flatten(0, 1), kv_2BHTD.contiguous(), group=group)
    early = [parts[rank, ..., :chunk, :] for rank in range(cp)]
    late = [parts[rank, ..., chunk:, :] for rank in reversed(range(cp))]
    return torch.cat([*early, *late], dim=3)


def _chunks(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank
