"""transformers' causal language models as decoders: hidden states by the model's own code, the head over
scored rows only.

What a model does after its last norm (a cap, a factor) is in a table by ``model_type``; whatever the table
says is held against the model's own forward once the weights are there.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ppl_eval.models import cpu_activation, cpu_linear, hf_attention, hf_tensor_parallel
from ppl_eval.models.decoder import Asked, Attend, Decoder, TensorParallelLayout
from ppl_eval.models.families import OWN_NAMES
from ppl_eval.models.hf_weights import Reader, Weights, under_module_names

# model_type -> key of the factor on logits, and whether they are divided by it
_FACTORS = {
    "granite": ("logits_scaling", True),
    "granitemoe": ("logits_scaling", True),
    "granitemoehybrid": ("logits_scaling", True),
    "granitemoeshared": ("logits_scaling", True),
    "hyperclovax": ("logits_scaling", False),
    "cohere": ("logit_scale", False),
    "cohere2": ("logit_scale", False),
    "minicpm3": ("logits_scaling", True),
    "falcon_h1": ("lm_head_multiplier", False),
}
_CAP = "final_logit_softcapping"
_CAPPED = ("gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma", "nanochat")
# Relative to the largest logit: what the order of roundings may do.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_TOLERANCE_HALF = 2e-2
_PROBE_ROWS = 4


class _TiedHead(nn.Module):
    """A head whose matrix is the embedding's: no parameter of its own, which loading would part from it.

    Args:
        embedding: the embedding; not a part of this module.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply."""
        return cpu_linear.linear(hidden, self._embedding[0].weight)


class _Hidden:
    """What stands in for a base model's output: hidden states, and None for all else that a head may ask."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        self.last_hidden_state = hidden_BTD

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class HFDecoder(Decoder):
    """A causal language model of transformers.

    Args:
        module: the ``...ForCausalLM``, on the meta device or not.
        config: the content of the config.json that it was built from.

    Raises:
        ValueError: if its parts cannot be told.
    """

    engine = "transformers"
    longer_windows = ""
    # Some rotary embeddings change their tables in the forward.
    is_reentrant = False
    _interface: hf_attention.Interface | None = None

    def __init__(self, module: Any, config: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.config = config
        # What transformers adds to a module has no types here.
        self._model: Any = module
        kind = type(module).__name__
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        # OPT's forward calls what is inside of its base model.
        self._base: Any = self._model.get_decoder()
        plain = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
        if not plain or self._base is module:
            raise ValueError(f"{kind} has no embedding, no linear head, or no base model that could be told")
        names = {id(part): name for name, part in module.named_modules()}
        self._embedding_name, self._head_name = names[id(embedding)], names[id(head)]
        self._is_tied = head.weight is embedding.weight
        if self._is_tied:
            if head.bias is not None:
                raise ValueError(f"{kind} has a tied head with a bias, which is not supported")
            module.set_submodule(self._head_name, _TiedHead(embedding))
        depth = self._model.config.get_text_config().num_hidden_layers
        lists = [
            name
            for name, part in module.named_modules()
            if isinstance(part, nn.ModuleList) and len(part) == depth
        ]
        if len(lists) != 1:
            found = ", ".join(lists) or "none"
            raise ValueError(f"{kind}: its list of {depth} layers cannot be told; such lists are {found}")
        self._layers_name = lists[0]

    @property
    def max_seq_len(self) -> int:
        """What config.json says; models without a limit, such as recurrent ones, say nothing."""
        text = self._model.config.get_text_config()
        return int(getattr(text, "max_position_embeddings", None) or 2**31 - 1)

    @property
    def embedding_name(self) -> str:
        """As transformers names it."""
        return self._embedding_name

    @property
    def head_name(self) -> str:
        """As transformers names it."""
        return self._head_name

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding were one parameter."""
        return self._is_tied

    @property
    def layers_name(self) -> str:
        """The only list with as many entries as there are layers."""
        return self._layers_name

    def check(self, hf_config: Mapping[str, Any] | None, asked: Asked) -> tuple[str, list[str]]:
        """The model was built from its config.json; see that it is the one beside the weights."""
        if asked.model_type != OWN_NAMES:
            raise ValueError(
                f"checkpointer.model_type is {asked.model_type}, and ppl_eval.models.hf takes weights under"
                f" the names of the files; use checkpointer.model_type={OWN_NAMES}"
            )
        advice = "use model.path=${checkpointer.checkpoint_dir}"
        if hf_config is None:
            raise ValueError(
                f"the checkpoint has no config.json to hold that of model.path against; {advice}"
            )
        own = self.config
        differing = sorted(key for key in {*own, *hf_config} if own.get(key) != hf_config.get(key))
        if differing:
            shown = ", ".join(f"{key} {own.get(key)} and {hf_config.get(key)}" for key in differing[:3])
            raise ValueError(
                f"config.json of model.path and that of the checkpoint differ in {len(differing)} keys"
                f" ({shown}): the weights belong to the second; {advice}"
            )
        return "checked", []

    def facts(self) -> dict[str, Any]:
        """Return the engine, its release and what attends; config.json is known by its hash."""
        return {"engine": self.engine, "release": version("transformers"), "attention": self._attention}

    def kernels(self) -> dict[str, list[str]]:
        """Return transformers' attention implementation."""
        return {"attention": [f"transformers: {self._attention}"]}

    @property
    def _attention(self) -> str:
        return str(self._model.config._attn_implementation)

    def own_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return those that transformers gives them: of routers, for one."""
        weights = self.module.state_dict().items()
        return {name: w.dtype for name, w in weights if w.is_floating_point() and w.dtype != dtype}

    def notes_on(self, dtype: torch.dtype) -> list[str]:
        """Say what stays in another dtype."""
        own = self.own_dtypes(dtype)
        if not own:
            return []
        return [f"{len(own)} weights stay in float32, as transformers keeps them ({next(iter(own))}, ...)"]

    def supports(self, axis: str) -> str | None:
        """Refuse what the model's code does not allow; data parallelism and FSDP are always there."""
        if axis == "branches":
            return super().supports(axis)
        key, reason = {
            "cp": ("context_parallel_dim", hf_attention.why_not(self._model, self._base)),
            "tp": ("tensor_parallel_dim", hf_tensor_parallel.why_not(self._model, self._ends)),
        }.get(axis, (axis, "ppl_eval.models.hf, which has plans of its own"))
        if reason is None:
            return None
        return (
            f"{key} is not available for {reason}; leave it out, and use data_parallel_shard_dim for a model"
            " that does not fit one device"
        )

    @property
    def _ends(self) -> tuple[str, str]:
        return self._embedding_name, self._head_name

    def tensor_parallel_layout(self) -> TensorParallelLayout:
        """Read transformers' plan for the model."""
        return hf_tensor_parallel.layout(self._model, self._ends)

    def stop_before_head(self) -> None:
        """Nothing: the base model ends there."""

    def hidden(self, tokens_BT: Tensor, positions_1T: Tensor | None, num_positions: int) -> Tensor:
        """Run the base model."""
        if positions_1T is None:
            hidden_BTD: Tensor = self._base(input_ids=tokens_BT, use_cache=False)[0]
            return hidden_BTD
        with hf_attention.rotated_by_length(self._base, num_positions):
            part_BTD: Tensor = self._base(input_ids=tokens_BT, position_ids=positions_1T, use_cache=False)[0]
        return part_BTD

    def set_attention(self, attend: Attend) -> None:
        """Have every layer attend through ``attend``, by transformers' attention interface."""
        reason = self.supports("cp")
        if reason is not None:
            raise ValueError(reason)
        self._interface = hf_attention.Interface(self._model.config, attend)

    @torch.no_grad()
    def check_parts(self, positions_1T: Tensor, num_positions: int) -> None:
        """Hold hidden states of a part of a short sequence against those of the model's own attention.

        Raises:
            ValueError: if they differ by more than rounding.
        """
        assert self._interface is not None
        tokens_BT = torch.arange(num_positions, device=positions_1T.device)[None] % self.vocab_size
        with self._interface.aside():
            whole_BTD = self.hidden(tokens_BT, None, num_positions)
        part_BTD = self.hidden(tokens_BT[:, positions_1T[0]], positions_1T, num_positions)
        self._interface.check_windows()
        dtype = self.embed_unit().weight.dtype
        hf_attention.check_difference(part_BTD, whole_BTD[:, positions_1T[0]], dtype)

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Multiply by the head's matrix, and apply the factor or cap of this kind of model."""
        # Some models end in float32 whatever their weights are, and cast here (Mamba 2).
        hidden_ND = hidden_ND.to(self.embed_unit().weight.dtype)
        logits_NV: Tensor = self.module.get_submodule(self._head_name)(hidden_ND)
        text = self._model.config.get_text_config()
        if text.model_type in _FACTORS:
            key, divides = _FACTORS[text.model_type]
            factor = getattr(text, key)
            logits_NV = logits_NV / factor if divides else logits_NV * factor
        cap = getattr(text, _CAP, None) if text.model_type in _CAPPED else None
        if cap is not None:
            # In the model's dtype, as transformers does.
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV.float()

    def own_weights(self, meta: Mapping[str, Tensor], reader: Reader) -> tuple[Weights, list[str]] | None:
        """Rename and join tensors as transformers does when it loads."""
        return under_module_names(self._model, meta, reader)

    @torch.no_grad()
    def check_head(self, device: torch.device) -> None:
        """Hold ``head`` against what the model's own forward makes of the same hidden states.

        Raises:
            ValueError: if they differ by more than rounding.
        """
        dtype, width = self.embed_unit().weight.dtype, self.embed_unit().embedding_dim
        random = torch.Generator().manual_seed(0)
        hidden_ND = torch.randn(_PROBE_ROWS, width, generator=random).to(device, dtype)
        found = _Hidden(hidden_ND[None])
        tokens_BT = torch.zeros(1, _PROBE_ROWS, dtype=torch.int64, device=device)
        self._base.forward = lambda *_, **__: found
        try:
            expected_NV = self._model(input_ids=tokens_BT, use_cache=False).logits[0].float()
        finally:
            del self._base.forward
        difference = (self.head(hidden_ND) - expected_NV).abs().max() / expected_NV.abs().max()
        if not difference <= _TOLERANCE.get(dtype, _TOLERANCE_HALF):
            raise ValueError(
                f"{type(self.module).__name__} does something to its logits that is not known here: they"
                f" differ by {float(difference):.1e} of the largest from what its own forward gives"
            )

    @torch.no_grad()
    def init_buffers(self, device: torch.device | str) -> None:
        """Compute rotary tables and other tensors that no checkpoint holds, by the model's own rules."""
        for parameter in self.module.parameters():
            setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
        for module in self.module.modules():
            names = module._non_persistent_buffers_set & set(module._buffers)
            held = {name: buffer for name in names if (buffer := module._buffers[name]) is not None}
            for name, buffer in held.items():
                setattr(module, name, torch.empty_like(buffer, device=device))
            if held:
                self._model._init_weights(module)

    def prepare(self, device: torch.device) -> None:
        """Take this project's products and activations on a CPU."""
        if device.type == "cpu":
            cpu_activation.install(self.module)
            cpu_linear.install(self.module)
