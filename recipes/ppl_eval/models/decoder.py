"""A causal decoder that can be scored: what every other package knows of a model, whichever engine runs it.

``engines.scorable`` returns one for what a config's ``model`` section built. Nothing outside this package
looks at the modules of an engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

# (queries, keys, values; keyword arguments window, softcap, scale, and sinks_H where a layer has them) ->
# attended values, all [B, H, T, D] with as many heads as each has; the queries' order of heads puts those of
# one key head side by side.
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class TensorParallelLayout:
    """How a decoder's matrices are divided among ranks.

    Attributes:
        split_outputs: names of linear layers of which each rank keeps some outputs (rows of the weight).
        split_inputs: names of linear layers of which each rank keeps some inputs; their results are summed.
        sizes: what must be divisible, by what it is called: heads, key-value heads, the width of the MLP.
        shrink: called with the number of ranks, to tell modules that count heads.
        gathered_outputs: like ``split_outputs``, but every rank needs all outputs: they are gathered.
        sliced_inputs: like ``split_inputs``, but every rank has all inputs, and takes its own.
    """

    split_outputs: Sequence[str]
    split_inputs: Sequence[str]
    sizes: Mapping[str, set[int]]
    shrink: Callable[[int], None]
    gathered_outputs: Sequence[str] = ()
    sliced_inputs: Sequence[str] = ()


@dataclass(frozen=True)
class Asked:
    """What a config says about the model beside its ``model`` section.

    Attributes:
        builder: dotted path that the ``model`` section names.
        config_check: ``error``, ``warn`` or ``off``.
        model_type: the checkpointer's ``model_type``, or None.
    """

    builder: str
    config_check: str = "error"
    model_type: str | None = None


class Decoder(ABC):
    """A causal decoder, built on the meta device by its engine.

    Args:
        module: holds the parameters, under the names that checkpoints are read with.

    Attributes:
        engine: the library whose code computes.
        is_reentrant: whether two threads may run it at the same time.
        longer_windows: what a config can do about windows that are longer than the model allows, to end a
            sentence with.
    """

    engine: str
    is_reentrant = True
    longer_windows = ", or raise model.max_seq_len if the checkpoint was trained for more"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    # What it is.

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """Most tokens that the model sees at once."""

    @property
    @abstractmethod
    def embedding_name(self) -> str:
        """Name of the embedding's module."""

    @property
    @abstractmethod
    def head_name(self) -> str:
        """Name of the head's module."""

    @property
    @abstractmethod
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding."""

    @property
    @abstractmethod
    def layers_name(self) -> str:
        """Name of the list of layers."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the whole vocabulary, also where the embedding is split."""
        return self.embed_unit().num_embeddings

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, in their order."""
        found = self.module.get_submodule(self.layers_name)
        assert isinstance(found, nn.ModuleList)
        return list(found)

    def embed_unit(self) -> nn.Embedding:
        """Return the embedding."""
        found = self.module.get_submodule(self.embedding_name)
        assert isinstance(found, nn.Embedding)
        return found

    def head_unit(self) -> nn.Module | None:
        """Return the head where it has a matrix of its own; None where it is the embedding's."""
        return None if self.is_tied else self.module.get_submodule(self.head_name)

    @abstractmethod
    def check(self, hf_config: Mapping[str, Any] | None, asked: Asked) -> tuple[str, list[str]]:
        """Hold the model against config.json, correcting what the engine computes differently.

        Args:
            hf_config: config.json of the checkpoint, or None.
            asked: what the config says about it.

        Returns:
            The verdict of the check (``checked``, ``differs``, ``unchecked``, ``off``) and notes.

        Raises:
            ValueError: if the model is not supported, or differs from config.json.
        """

    def facts(self) -> dict[str, Any]:
        """Return what decides the bits of its scores and stands in no other place; JSON values."""
        return {"engine": self.engine}

    def kernels(self) -> dict[str, list[str]]:
        """Return which functions compute what engines leave open, by what they compute; for the result."""
        return {}

    def batch_dependence(self, device: torch.device) -> str | None:
        """Return why the bits of a window may depend on the windows that it is batched with and on padding,
        in words for the result; None where they do not. For a model that holds its weights."""
        return f"{self.engine} computes, whose kernels may be chosen by the shape of a batch"

    def notes_on(self, dtype: torch.dtype) -> list[str]:
        """Return what a reader must know about computing in this dtype."""
        return []

    def own_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtypes of weights that stay in another than that of the run, by name."""
        return {}

    def supports(self, axis: str) -> str | None:
        """Return why the model cannot be split along ``cp`` or ``tp`` or by a ``tensor_parallel_plan``, or
        not run ``branches`` (``hidden_of_branches``); None where it can."""
        return "this engine has no masks of its own" if axis == "branches" else None

    # What is done with it.

    @abstractmethod
    def stop_before_head(self) -> None:
        """Have the module's own forward end before its head, where ``hidden`` calls that."""

    @abstractmethod
    def hidden(self, tokens_BT: Tensor, positions_1T: Tensor | None, num_positions: int) -> Tensor:
        """Return what the head is given, [B, T, D]: hidden states after the last norm.

        Args:
            tokens_BT: inputs; int64. Padding stands at the end and is hidden by causality.
            positions_1T: of the tokens, where they are a part of a sequence; None for 0 to T - 1.
            num_positions: length of the whole sequence.
        """

    def hidden_of_branches(self, tokens_BT: Tensor, positions_BT: Tensor, mask_BTT: Tensor) -> Tensor:
        """Return what ``hidden`` does, for sequences that share a beginning and go on in branches.

        Args:
            tokens_BT: inputs; int64.
            positions_BT: of the tokens; a branch has those that it would have alone.
            mask_BTT: True where a token sees another.
        """
        raise NotImplementedError

    @abstractmethod
    def head(self, hidden_ND: Tensor) -> Tensor:
        """Return logits [N, V], float32, every cap and factor applied; N rows of what ``hidden`` returned."""

    @abstractmethod
    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the tensors that no checkpoint holds, on the device."""

    def own_weights(
        self, meta: Mapping[str, Tensor], reader: Callable[[str], Callable[[], Tensor]]
    ) -> tuple[dict[str, tuple[Tensor, Callable[[], Tensor]]], list[str]] | None:
        """Put a checkpoint's tensors under the names of ``module``.

        Args:
            meta: shape and dtype of each tensor.
            reader: returns the function that reads one.

        Returns:
            Meta tensor and function that reads, by name, and notes; None where names are right already.
        """
        return None

    def check_head(self, device: torch.device) -> None:  # noqa: B027
        """Check, once in a forward and with the head whole, what could not be checked before.

        Raises:
            ValueError: if the head does not give the model's own logits.
        """

    def check_parts(self, positions_1T: Tensor, num_positions: int) -> None:  # noqa: B027
        """Check, once in a forward after ``set_attention``, what could not be checked before; all ranks that
        share sequences call it together.

        Args:
            positions_1T: this rank's part of a short sequence.
            num_positions: its length.

        Raises:
            ValueError: if a sequence in parts does not give the hidden states of the whole.
        """

    @abstractmethod
    def prepare(self, device: torch.device) -> None:
        """Choose kernels that suit the device; not called for a model that will be compiled."""

    def compile(self) -> None:
        """Have every layer compiled."""
        for layer in self.layers:
            layer.compile()

    def set_attention(self, attend: Attend) -> None:
        """Have every layer attend through ``attend``, with its own window, cap and scale.

        Raises:
            ValueError: where ``supports("cp")`` has a reason against it.
        """
        raise NotImplementedError

    def tensor_parallel_layout(self) -> TensorParallelLayout:
        """Return how the layers are divided among ranks.

        Raises:
            ValueError: where ``supports("tp")`` has a reason against it.
        """
        raise NotImplementedError

    def apply_plan(self, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
        """Apply a user's ``tensor_parallel_plan``."""
        raise NotImplementedError
