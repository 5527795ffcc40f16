"""llama.cpp's GGUF files of the llama architecture, dequantised, so that both sides can score the same
weights.

llama.cpp stores the rows of the query and key projections with the two halves of each rotary pair side by
side. That is torchtune's own order (and Meta's): names change, rows stay. Only the way to Hugging Face's
order would need a permutation.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppl_eval.checkpoints.gguf_config import ARCHITECTURE, gguf_config
from ppl_eval.checkpoints.lazy_state_dict import LazyStateDict
from ppl_eval.checkpoints.safetensors import StoredTensor, check_readable, map_tensor
from ppl_eval.models import config_check, families
from ppl_eval.models.hf_config import HFConfig

WHOLE_NAMES = {
    "token_embd.weight": "tok_embeddings.weight",
    "output_norm.weight": "norm.scale",
    "output.weight": "output.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "sa_norm.scale",
    "attn_q.weight": "attn.q_proj.weight",
    "attn_k.weight": "attn.k_proj.weight",
    "attn_v.weight": "attn.v_proj.weight",
    "attn_output.weight": "attn.output_proj.weight",
    "ffn_norm.weight": "mlp_norm.scale",
    "ffn_gate.weight": "mlp.w1.weight",
    "ffn_up.weight": "mlp.w3.weight",
    "ffn_down.weight": "mlp.w2.weight",
}
# Kinds that hold numbers as they are; all others hold blocks of quantised ones.
PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# Llama 3.1's frequency factors as a tensor; torchtune's builder computes the same ones from scale_factor.
ROTARY_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
NO_WINDOW = (
    "llama.cpp's files of Mistral name no sliding window, so attention is full: the same as transformers for"
    " every Mistral but 7B v0.1, and for that up to 4096 tokens; its config.json beside it adds the window"
)


def read_gguf(
    path: Path, *, model_type: str, beside: HFConfig | None, notes: list[str]
) -> tuple[LazyStateDict, dict[str, Any]]:
    """Read weights under torchtune's names, and hyperparameters under those of an HF config.json.

    Args:
        path: the file; a model split over several files is not read.
        model_type: torchtune's; must be one whose layout the architecture ``llama`` covers.
        beside: config.json of the same folder, or None; it must not contradict the file.
        notes: what the person should know is appended here.

    Returns:
        The state dict (float32 where the file holds quantised blocks) and the hyperparameters.

    Raises:
        ValueError: for a truncated or corrupt file, another architecture, a quantisation that gguf cannot
            undo.
    """
    reader = _open(path)
    from gguf import GGMLQuantizationType

    fields = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")
    }
    _check_kind(path, fields, model_type)
    lazy = LazyStateDict()
    kinds: dict[str, int] = {}
    rope_factors = None
    for tensor in reader.tensors:
        kind = GGMLQuantizationType(tensor.tensor_type)
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
        stored = _stored(path, tensor, kind)
        if tensor.name == ROTARY_FACTORS:
            rope_factors = stored.read()
            continue
        if tensor.name in LONGROPE_FACTORS:
            raise ValueError(
                f"{path} scales RoPE by {tensor.name} (LongRoPE), which no llama builder of torchtune 0.6.1"
                " computes: score the model with transformers or llama.cpp"
            )
        lazy.add(_tune_name(tensor.name), stored.meta, stored.read)
    counts = ", ".join(f"{num} {kind}" for kind, num in sorted(kinds.items()))
    notes.append(f"{path.name}: {len(lazy)} tensors dequantised from GGUF ({counts})")
    embedding = lazy.meta.get("tok_embeddings.weight")
    config = gguf_config(
        path,
        fields,
        model_type=_hf_model_type(model_type, beside),
        vocab_size=None if embedding is None else embedding.shape[0],
        rope_factors=rope_factors,
    )
    config["tie_word_embeddings"] = "output.weight" not in lazy
    if beside:
        config = dict(config_check.completed(config, beside, notes))
    elif config["model_type"] == "mistral" and config["sliding_window"] is None:
        notes.append(f"{path.name}: {NO_WINDOW}")
    return lazy, config


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise ValueError("reading GGUF files needs the package gguf: pip install gguf") from e
    size = check_readable(path)
    try:
        return GGUFReader(str(path))
    except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError) as e:
        expected = _expected_size(path)
        if expected > size:
            raise ValueError(
                f"{path} is truncated: expected {expected} bytes, found {size}; download or copy it again"
            ) from e
        raise ValueError(
            f"{path} ({size} bytes) is truncated or corrupt: {type(e).__name__}: {str(e)[:200]}"
        ) from e


def _hf_model_type(model_type: str, beside: HFConfig | None) -> str:
    """Return what config.json calls the model: llama.cpp has one architecture for Llama and Mistral."""
    if beside and "model_type" in beside:
        architecture = families.architecture_of(beside)
        if architecture.gguf == ARCHITECTURE:
            return architecture.model_type
    return families.family_of_model_type(model_type).architecture.model_type


def _expected_size(path: Path) -> int:
    """Return the bytes that a damaged file's tensor list needs; 0 when the list itself is damaged."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    class Sizes(GGUFReader):
        """Reader that adds up the list instead of mapping what it lists."""

        end = 0

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _, _, _, dims, kind, offset = field.parts
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
                num_bytes = int(np.prod(dims.astype(np.int64))) // block * block_bytes
                self.end = max(self.end, int(start_offs) + int(offset[0]) + num_bytes)

    try:
        return Sizes(str(path)).end
    except Exception:  # whatever a damaged list makes the package do: then no size is known
        return 0


def _check_kind(path: Path, fields: dict[str, Any], model_type: str) -> None:
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{path} holds the architecture {architecture!r}; of GGUF files only {ARCHITECTURE!r} is read"
        )
    allowed = sorted(
        {family.model_type for family in families.FAMILIES if family.architecture.gguf == architecture}
    )
    if model_type not in allowed:
        raise ValueError(
            f"{path} is of the {architecture} architecture; checkpointer.model_type can be"
            f" {', '.join(allowed)}"
        )
    if fields.get("split.count", 0) > 1:
        raise ValueError(
            f"{path} is one of {fields['split.count']} parts: join them with `llama-gguf-split --merge`"
        )
    if fields.get("llama.expert_count", 0) > 0:
        raise ValueError(f"{path} is a mixture of experts, which torchtune's llama builders are not")


def _tune_name(name: str) -> str:
    """Return torchtune's name; an unknown tensor keeps its own and is reported with all that does not fit."""
    layer = LAYER.fullmatch(name)
    if layer and layer[2] in LAYER_NAMES:
        return f"layers.{layer[1]}.{LAYER_NAMES[layer[2]]}"
    return WHOLE_NAMES.get(name, name)


def _stored(path: Path, tensor: Any, kind: Any) -> StoredTensor:
    """Describe one tensor; GGUF lists its dimensions from the innermost, so they are reversed here."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    offset, num_bytes = int(tensor.data_offset), int(tensor.n_bytes)
    if kind.name in PLAIN_DTYPES:
        dtype = PLAIN_DTYPES[kind.name]
        return StoredTensor(
            torch.empty(shape, dtype=dtype, device="meta"), partial(map_tensor, path, offset, shape, dtype)
        )
    return StoredTensor(
        torch.empty(shape, dtype=torch.float32, device="meta"),
        partial(_dequantize, path, offset, num_bytes, shape, kind),
    )


def _dequantize(path: Path, offset: int, num_bytes: int, shape: tuple[int, ...], kind: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    raw = map_tensor(path, offset, (num_bytes,), torch.uint8).numpy()
    try:
        values = dequantize(raw, kind)
    except NotImplementedError as e:
        raise ValueError(f"{path} holds {kind.name} blocks, which the package gguf cannot dequantise") from e
    return torch.from_numpy(values.astype(np.float32, copy=False)).view(shape)
