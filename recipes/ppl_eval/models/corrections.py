"""What torchtune 0.6.1 computes differently from transformers, corrected in place on the built model.

Each correction takes ``(model, builder, facts)``, works on meta and on real tensors, may be applied
twice, changes no parameter's name (torchtune's checkpoints keep loading) and returns one line for the result
per thing it did. docs/families.md gives the size of every error.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.models.phi3._position_embeddings import Phi3RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention, TransformerDecoder, TransformerSelfAttentionLayer

from ppl_eval.models import attention

# What config.json says, defaults filled in (``architectures.Architecture.facts``); None without one.
Facts = Mapping[str, Any] | None


def builder_name(builder: str) -> str:
    """Return the last part of a builder's dotted path, without ``lora_`` or ``qlora_``."""
    return re.sub("^q?lora_", "", builder.rpartition(".")[2])


class Gemma2Layer(TransformerSelfAttentionLayer):
    """Gemma 2's layer with the two norms around its feed-forward in their places.

    torchtune's converter stores transformers' ``pre_feedforward_layernorm`` as ``mlp_scale`` and
    ``post_feedforward_layernorm`` as ``mlp_norm``, and the layer applies ``mlp_norm`` before the
    feed-forward. The names stay, so that checkpoints which torchtune wrote load too; the order of use is
    exchanged.
    """

    def forward(self, x: Tensor, *, mask: Any = None, input_pos: Tensor | None = None, **_: Any) -> Tensor:
        """Map hidden states [B, T, D] to the next layer's, like the layer it replaces."""
        h = self.sa_norm(x)
        h = x + self.sa_scale(self.attn(h, h, mask=mask, input_pos=input_pos))
        return h + self.mlp_norm(self.mlp(self.mlp_scale(h)))


def gemma2_builder_caps(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Undo the swap of the two caps in torchtune's sized builders: 30 for attention, 50 for logits."""
    if builder_name(builder) not in ("gemma2_2b", "gemma2_9b", "gemma2_27b") or not _uncorrected_gemma2(
        model
    ):
        return []
    for layer in model.layers:
        layer.attn.softcapping = 50.0
    model.norm.capping_value = 30.0
    return [
        f"{builder_name(builder)}: attention scores capped at 50 and logits at 30; "
        "torchtune's builder swaps the two"
    ]


def gemma2_final_softcap(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Move the final cap from the normed hidden state to the logits: the scorer applies the attribute."""
    if not isinstance(model.norm, Gemma2FinalNorm) or isinstance(model.norm.logit_capping, nn.Identity):
        return []
    model.final_logit_softcap = float(model.norm.capping_value)
    model.norm.logit_capping = nn.Identity()
    return [
        f"gemma2: logits capped at {model.final_logit_softcap:g}; "
        "torchtune caps the normed hidden state instead"
    ]


def gemma2_layers(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Put the feed-forward's norms in order and run attention in blocks, without a T x T mask."""
    if not _uncorrected_gemma2(model):
        return []
    for index, layer in enumerate(model.layers):
        old = layer.attn
        new = MultiHeadAttention(
            embed_dim=old.embed_dim,
            num_heads=old.num_heads,
            num_kv_heads=old.num_kv_heads,
            head_dim=old.head_dim,
            q_proj=old.q_proj,
            k_proj=old.k_proj,
            v_proj=old.v_proj,
            output_proj=old.output_proj,
            pos_embeddings=old.pos_embeddings,
            max_seq_len=old.max_seq_len,
        )
        attention.install(new, window=old.sliding_window_size, softcap=old.softcapping, scale=old.scaling)
        model.layers[index] = Gemma2Layer(
            attn=new,
            mlp=layer.mlp,
            sa_norm=layer.sa_norm,
            mlp_norm=layer.mlp_norm,
            sa_scale=layer.sa_scale,
            mlp_scale=layer.mlp_scale,
        ).train(layer.training)
    return [
        "gemma2: pre- and post-feed-forward norms put in transformers' order; torchtune swaps them",
        "gemma2: attention runs in blocks of queries (the same arithmetic, memory linear in the length)",
    ]


def _uncorrected_gemma2(model: TransformerDecoder) -> bool:
    return isinstance(model.layers[0].attn, Gemma2Attention)


def sliding_windows(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Give each layer the window that config.json names; torchtune's builders have none."""
    if facts is None:
        return [
            f"{builder_name(builder)}: no config.json, so no sliding window is applied "
            "(Mistral-7B-v0.1 has 4096, Phi-3-mini-4k 2047)"
        ]
    windows = facts["sliding_window"]
    if len(windows) != len(model.layers) or not any(windows):
        return []  # A wrong number of layers is the config check's to report.
    for layer, window in zip(model.layers, windows, strict=True):
        attention.install(layer.attn, window=window)
    sizes = sorted({window for window in windows if window})
    number = sum(window is not None for window in windows)
    return [
        f"sliding window of {', '.join(map(str, sizes))} tokens applied to {number} of {len(windows)} "
        "layers; torchtune ignores it"
    ]


class Phi3RoPE(nn.Module):
    """Rotary positions of the Phi-3 architecture: on a part of the head, with LongRoPE's factors.

    inv_freq_i = 1 / (factor_i * base ** (2i / rotary_dim)); cosine and sine are multiplied by
    ``attention_factor``. As in transformers, the long factors serve a whole batch as soon as one position in
    it reaches ``original_max_seq_len``.
    Source: LongRoPE (arXiv:2402.13753) and transformers' ``_compute_longrope_parameters``.

    Args:
        dim: head size.
        rotary_dim: how many of its channels are rotated.
        base: RoPE base.
        short_factor: one divisor per frequency, for short sequences; None for all ones.
        long_factor: the same for sequences longer than ``original_max_seq_len``.
        original_max_seq_len: longest sequence, in tokens, of the short factors.
        attention_factor: factor on cosine and sine.

    Attributes:
        sequence_length: tokens in the whole sequence where a rank has a part of it (context parallelism);
            None where ``input_pos`` says it.
    """

    theta: Tensor
    theta_long: Tensor
    sequence_length: int | None = None

    def __init__(
        self,
        dim: int,
        rotary_dim: int,
        base: float,
        *,
        short_factor: list[float] | None = None,
        long_factor: list[float] | None = None,
        original_max_seq_len: int = 0,
        attention_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.rotary_dim = rotary_dim
        self.base = base
        self.short_factor = short_factor
        self.long_factor = long_factor
        self.original_max_seq_len = original_max_seq_len
        self.attention_factor = attention_factor
        self.rope_init()

    def rope_init(self) -> None:
        """Compute the frequencies on the default device; loaders call it after building on meta."""
        exponent = torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim
        for name, factor in (("theta", self.short_factor), ("theta_long", self.long_factor)):
            divisor = (
                torch.ones_like(exponent) if factor is None else torch.tensor(factor, dtype=torch.float32)
            )
            self.register_buffer(name, 1.0 / (divisor * self.base**exponent), persistent=False)

    def forward(self, x_BTHD: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Rotate queries or keys [B, T, H, D]; ``input_pos`` [B, T] or None for 0 to T - 1."""
        num_positions = x_BTHD.shape[1]
        position = torch.arange(num_positions, device=x_BTHD.device)[None] if input_pos is None else input_pos
        theta = self.theta
        if self.long_factor is not None:
            length = self.sequence_length
            if length is None:
                length = num_positions if input_pos is None else int(input_pos.max()) + 1
            theta = self.theta_long if length > self.original_max_seq_len else self.theta
        angle = position[..., None].float() * theta.to(x_BTHD.device)
        angle = torch.cat((angle, angle), dim=-1)[:, :, None, :]
        cos, sin = angle.cos() * self.attention_factor, angle.sin() * self.attention_factor
        rotated, passed = x_BTHD.split((self.rotary_dim, self.dim - self.rotary_dim), dim=-1)
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated.type_as(x_BTHD), passed), dim=-1)


def phi4_rope_base(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Give phi4_14b the RoPE base of microsoft/phi-4, 250,000; torchtune's builder leaves Phi-3's 10,000."""
    ropes = {layer.attn.pos_embeddings for layer in model.layers}
    if builder_name(builder) != "phi4_14b" or any(rope.base != 10_000 for rope in ropes):
        return []
    for rope in ropes:
        rope.base = 250_000
        with rope.theta.device:
            rope.rope_init()
    return ["phi4_14b: RoPE base 250000 as in microsoft/phi-4; torchtune's builder has 10000"]


def phi3_rotary(model: TransformerDecoder, builder: str, facts: Facts) -> list[str]:
    """Rotate a part of the head, and by LongRoPE, where config.json says so; torchtune does neither."""
    if facts is None or not isinstance(model.layers[0].attn.pos_embeddings, Phi3RotaryPositionalEmbeddings):
        return []
    scaling = facts["rope_scaling"]
    is_partial = facts["rotary_dim"] != facts["head_dim"]
    if scaling["rope_type"] not in ("default", "longrope") or (
        scaling["rope_type"] == "default" and not is_partial
    ):
        return []
    old = model.layers[0].attn.pos_embeddings
    with old.theta.device:
        rope = Phi3RoPE(
            dim=old.dim,
            rotary_dim=old.dim * facts["rotary_dim"] // facts["head_dim"],
            base=old.base,
            short_factor=scaling.get("short_factor"),
            long_factor=scaling.get("long_factor"),
            original_max_seq_len=scaling.get("original_max_position_embeddings", 0),
            attention_factor=scaling.get("attention_factor", 1.0),
        )
    for layer in model.layers:
        layer.attn.pos_embeddings = rope
    notes = []
    if rope.rotary_dim != rope.dim:
        notes.append(
            f"phi3: RoPE on {rope.rotary_dim} of {rope.dim} channels of a head; torchtune rotates all"
        )
    if rope.long_factor is not None:
        notes.append(
            f"phi3: LongRoPE; inputs longer than {rope.original_max_seq_len} tokens use the long factors, as "
            "does every window that shares a batch with one"
        )
    return notes
