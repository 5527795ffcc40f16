"""torchtune's decoders, and builders' of this project that return one: the default engine."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear
from torchtune.training import prepare_mha_for_tp

from ppl_eval.models import attention, config_check, cpu_activation, cpu_linear, families
from ppl_eval.models import cpu_rotary as rotary
from ppl_eval.models.decoder import Asked, Attend, Decoder, TensorParallelLayout

# Columns of q, k, v, gate and up are split; output projections and down take split inputs and give parts of a
# sum.
_SPLIT_OUTPUTS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3")
_SPLIT_INPUTS = ("attn.output_proj", "mlp.w2")


class TorchtuneDecoder(Decoder):
    """A torchtune ``TransformerDecoder``.

    Args:
        module: the decoder, on the meta device or not.
    """

    engine = "torchtune"
    embedding_name = "tok_embeddings"
    head_name = "output"
    layers_name = "layers"
    module: TransformerDecoder

    @property
    def max_seq_len(self) -> int:
        """What the builder was given."""
        return self.module.max_seq_len

    @property
    def is_tied(self) -> bool:
        """Whether the head is a ``TiedLinear``, which is no module."""
        return isinstance(self.module.output, TiedLinear)

    def check(self, hf_config: Mapping[str, Any] | None, asked: Asked) -> tuple[str, list[str]]:
        """Correct what torchtune computes differently from transformers, then compare with config.json."""
        notes = families.correct(self.module, asked.builder, hf_config)
        verdict, remarks = config_check.verify(
            self.module, asked.builder, hf_config, asked.config_check, asked.model_type
        )
        return verdict, notes + remarks

    def kernels(self) -> dict[str, list[str]]:
        """Return which functions attend, which modules rotate and which multiply, in all layers."""
        attends, rotates, multiplies = set(), set(), set()
        for layer in self.layers:
            call = getattr(layer.attn, "_attention_call", None)
            function = call.func if isinstance(call, partial) else call
            attends.add(_name_of(type(layer.attn) if function is None else function))
            embedding = getattr(layer.attn, "pos_embeddings", None)
            if embedding is not None:
                rotates.add(_name_of(type(embedding)))
            multiplies |= {_name_of(type(part)) for part in layer.modules() if isinstance(part, nn.Linear)}
        return {"attention": sorted(attends), "rotary": sorted(rotates), "linear": sorted(multiplies)}

    def batch_dependence(self, device: torch.device) -> str | None:
        """Promise the same bits where every kernel is one of those that ``prepare`` chooses on a CPU."""
        if device.type != "cpu" or not cpu_linear.is_available():
            return f"kernels of this {device.type} device are chosen by the shape of a batch"
        weights = list(self.module.parameters())
        # FSDP's are plain ones while a layer computes.
        if any(type(weight.data) not in (Tensor, DTensor) for weight in weights):
            return "quantised weights have products of their own"
        others = {weight.dtype for weight in weights} - {torch.float32, torch.bfloat16}
        if others:
            return (
                f"products in {str(others.pop()).removeprefix('torch.')} are chosen by the shape of a batch"
            )
        if any(getattr(module, "long_factor", None) is not None for module in self.module.modules()):
            return "the longest window of a batch chooses the factors of its rotary embedding (LongRoPE)"
        return None

    def notes_on(self, dtype: torch.dtype) -> list[str]:
        """Say what stays in float32."""
        if dtype != torch.float64:
            return []
        return ["dtype=fp64: torchtune's norms and rotary embeddings, and the log-softmax, stay in float32"]

    def supports(self, axis: str) -> str | None:
        """Name a layer whose score function is not known, for ``cp``; a tied head, for a plan; for branches a
        layer that counts positions by their place in the row."""
        if axis == "branches":
            return self._why_no_branches()
        if axis == "tensor_parallel_plan" and self.is_tied:
            # Its embedding would be a distributed tensor, the head's input a plain one.
            return (
                "tensor_parallel_plan cannot be used with a model whose head is tied to its embedding; leave "
                "tensor_parallel_plan out: the built-in plan splits tied heads too"
            )
        if axis in ("tp", "tensor_parallel_plan") and self._has_norms_over_heads():
            return (
                "tensor_parallel_dim above 1 would split the heads of this model, whose queries and keys are"
                " normalised over all heads together; set tensor_parallel_dim: 1, and split the weights by"
                " data_parallel_shard_dim or the sequence by context_parallel_dim"
            )
        for index, layer in enumerate(self.module.layers if axis == "cp" else ()):
            attn = layer.attn
            if type(attn) not in attention.KINDS or not attn.is_causal:
                return (
                    f"layers.{index}.attn is a {type(attn).__name__}; context_parallel_dim above 1 needs "
                    "torchtune's causal MultiHeadAttention, set context_parallel_dim: 1"
                )
        return None

    def _has_norms_over_heads(self) -> bool:
        return any(getattr(layer.attn, "whole_width", False) for layer in self.module.layers)

    def stop_before_head(self) -> None:
        """Replace the module's ``unembed`` by the final norm alone."""
        self.module.unembed = lambda hidden_BTD: self.module.norm(hidden_BTD)

    def hidden(self, tokens_BT: Tensor, positions_1T: Tensor | None, num_positions: int) -> Tensor:
        """Run the decoder up to its last norm."""
        if positions_1T is None:
            return self.module(tokens_BT)
        for module in self.module.modules():
            # Rotary embeddings that choose their factors by the whole length.
            if hasattr(module, "sequence_length"):
                module.sequence_length = num_positions
        return self.module(tokens_BT, input_pos=positions_1T)

    def _why_no_branches(self) -> str | None:
        for index, layer in enumerate(self.module.layers):
            if type(layer.attn) not in attention.KINDS or attention.installed(layer.attn)["window"]:
                return f"layers.{index}.attn has a sliding window or a mask of its own"
        if any(hasattr(module, "sequence_length") for module in self.module.modules()):
            return "its rotary embedding depends on the length of the whole sequence"
        return None

    def hidden_of_branches(self, tokens_BT: Tensor, positions_BT: Tensor, mask_BTT: Tensor) -> Tensor:
        """Run the decoder up to its last norm."""
        return self.module(tokens_BT, mask=mask_BTT, input_pos=positions_BT)

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Multiply by the head's matrix; divide (Granite) and cap where the family does (``corrections``)."""
        logits_NV = self.module.output(hidden_ND).float()
        divisor = getattr(self.module, "logits_scaling", 1.0)
        logits_NV = logits_NV if divisor == 1.0 else logits_NV.div_(divisor)
        softcap = getattr(self.module, "final_logit_softcap", None)
        return logits_NV if softcap is None else logits_NV.div_(softcap).tanh_().mul_(softcap)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary tables."""
        with torch.device(device):
            for module in self.module.modules():
                rope_init = getattr(module, "rope_init", None)
                if callable(rope_init):
                    rope_init()

    def prepare(self, device: torch.device) -> None:
        """Put kernels that suit a CPU in the places of torchtune's."""
        if device.type == "cpu":
            attention.install_everywhere(self.module)
            rotary.install(self.module)
            cpu_activation.install(self.module)
            cpu_linear.install(self.module)

    def compile(self) -> None:
        """Compile as torchtune's recipes do."""
        training.compile_model(self.module)

    def set_attention(self, attend: Attend) -> None:
        """Keep windows, caps and scales that ``attention.install`` gave the layers."""
        reason = self.supports("cp")
        if reason is not None:
            raise ValueError(reason)
        for layer in self.module.layers:
            attn = layer.attn
            group = attn.num_heads // attn.num_kv_heads
            attn._attention_call = partial(
                _attend, attend=attend, queries_per_key=group, constants=attention.installed(attn)
            )

    def tensor_parallel_layout(self) -> TensorParallelLayout:
        """Divide heads and the MLP's inner width."""
        outputs, inputs = [], []
        sizes: dict[str, set[int]] = {"heads": set(), "key-value heads": set(), "MLP width": set()}
        for index, layer in enumerate(self.module.layers):
            sizes["heads"].add(layer.attn.num_heads)
            sizes["key-value heads"].add(layer.attn.num_kv_heads)
            sizes["MLP width"].add(layer.mlp.w1.out_features)
            # w3 is None in an MLP without a gate.
            outputs += [f"layers.{index}.{path}" for path in _SPLIT_OUTPUTS if _has(layer, path)]
            inputs += [f"layers.{index}.{path}" for path in _SPLIT_INPUTS]
        return TensorParallelLayout(outputs, inputs, sizes, self._shrink)

    def _shrink(self, num_ranks: int) -> None:
        for layer in self.module.layers:
            layer.attn.num_heads //= num_ranks
            layer.attn.num_kv_heads //= num_ranks

    def apply_plan(self, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
        """Apply the plan as torchtune's recipes do."""
        prepare_mha_for_tp(self.module, mesh)
        parallelize_module(self.module, mesh, dict(plan))


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _has(layer: nn.Module, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return getattr(layer.get_submodule(parent), name, None) is not None


def _attend(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    *,
    attend: Attend,
    queries_per_key: int,
    constants: Mapping[str, Any],
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
) -> Tensor:
    """Take the place of torchtune's ``_attention_call``, which repeats keys and values of grouped queries."""
    assert mask is None
    assert dropout_p == 0.0
    assert is_causal
    return attend(q_BHTD, k_BHTD[:, ::queries_per_key], v_BHTD[:, ::queries_per_key], **constants)
