"""llama.cpp's GGUF files, dequantised, so that both sides can score the same weights."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppl_eval.checkpoints.gguf_config import LONGROPE_FACTORS, ROTARY_FACTORS, gguf_config
from ppl_eval.checkpoints.gguf_names import FORMS, Form, hf_name, undo
from ppl_eval.checkpoints.safetensors import StoredTensor, check_readable, map_tensor
from ppl_eval.models import config_check, families
from ppl_eval.models.hf_config import HFConfig

# Kinds that hold numbers as they are; all others hold blocks of quantised ones.
PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NO_WINDOW = {
    "mistral": (
        "llama.cpp's files of Mistral name no sliding window, so attention is full: the same as transformers"
        " for every Mistral but 7B v0.1, and for that up to 4096 tokens; its config.json beside it adds the"
        " window"
    ),
    "phi3": (
        "the file names no sliding window, so attention is full; Phi-3-mini-4k was trained with 2047 tokens,"
        " and its config.json beside the file adds the window"
    ),
}


def read_gguf(
    path: Path, *, model_type: str, beside: HFConfig | None, notes: list[str]
) -> tuple[dict[str, StoredTensor], dict[str, Any], str]:
    """Read weights under Hugging Face's names, and hyperparameters under those of an HF config.json.

    Args:
        path: the file; a model split over several files is not read.
        model_type: torchtune's; must be one whose layout the file's architecture has.
        beside: config.json of the same folder, or None; it must not contradict the file.
        notes: what the person should know is appended here.

    Returns:
        The tensors (float32 where the file holds quantised blocks), the hyperparameters, and the kinds of
        blocks.

    Raises:
        ValueError: for a truncated or corrupt file, another architecture, a quantisation that gguf cannot
            undo.
    """
    reader = _open(path)
    from gguf import GGMLQuantizationType

    fields = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")
    }
    form = _form(path, fields, model_type)
    held: dict[str, StoredTensor] = {}
    kinds: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = GGMLQuantizationType(tensor.tensor_type)
        kinds[kind.name] = kinds.get(kind.name, 0) + 1
        held[tensor.name] = _stored(path, tensor, kind)
    rope = {name: held.pop(name).read() for name in (ROTARY_FACTORS, *LONGROPE_FACTORS) if name in held}
    counts = ", ".join(f"{num} {kind}" for kind, num in sorted(kinds.items()))
    notes.append(f"{path.name}: {len(held)} tensors dequantised from GGUF ({counts})")
    embedding = held.get("token_embd.weight")
    config = gguf_config(
        path,
        fields,
        form,
        model_type=_hf_model_type(fields["general.architecture"], model_type, beside),
        vocab_size=None if embedding is None else embedding.meta.shape[0],
        rope_factors=rope,
    )
    config["tie_word_embeddings"] = "output.weight" not in held
    named = {hf_name(form, name): _undone(tensor, undo(form, name, config)) for name, tensor in held.items()}
    if beside:
        config = dict(config_check.completed(config, beside, notes))
    elif config["model_type"] in NO_WINDOW and config["sliding_window"] is None:
        notes.append(f"{path.name}: {NO_WINDOW[config['model_type']]}")
    return named, config, f"GGUF: {counts}"


def _undone(tensor: StoredTensor, change: Callable[[torch.Tensor], torch.Tensor] | None) -> StoredTensor:
    return tensor if change is None else StoredTensor(tensor.meta, lambda: change(tensor.read()))


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


def _hf_model_type(architecture: str, model_type: str, beside: HFConfig | None) -> str:
    """Return what config.json calls the model: llama.cpp has one architecture for Llama and Mistral."""
    if beside and "model_type" in beside:
        named = families.architecture_of(beside)
        if named.gguf == architecture:
            return named.model_type
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


def _form(path: Path, fields: Mapping[str, Any], model_type: str) -> Form:
    """Return how llama.cpp stores the file's architecture.

    Raises:
        ValueError: for one that is not read, another ``model_type``, a part of a model, or a mixture of
            experts.
    """
    architecture = str(fields.get("general.architecture"))
    known = {family.architecture.gguf or "" for family in families.FAMILIES} & set(FORMS)
    if architecture not in known:
        raise ValueError(
            f"{path} holds the architecture {architecture!r}; of GGUF files those of"
            f" {', '.join(sorted(known))} are read"
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
    if fields.get(f"{architecture}.expert_count", 0) > 0:
        raise ValueError(f"{path} is a mixture of experts, which torchtune's builders are not")
    return FORMS[architecture]


def _stored(path: Path, tensor: Any, kind: Any) -> StoredTensor:
    """Describe one tensor; GGUF lists its dimensions from the innermost, so they are reversed here."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    offset, num_bytes = int(tensor.data_offset), int(tensor.n_bytes)
    if kind.name in PLAIN_DTYPES:
        dtype = PLAIN_DTYPES[kind.name]
        return StoredTensor(
            torch.empty(shape, dtype=dtype, device="meta"), partial(map_tensor, path, offset, shape, dtype)
        )
    _check_known(path, tensor.name, kind)
    return StoredTensor(
        torch.empty(shape, dtype=torch.float32, device="meta"),
        partial(_dequantize, path, offset, num_bytes, shape, kind),
    )


def _check_known(path: Path, name: str, kind: Any) -> None:
    """Refuse kinds of blocks that gguf cannot dequantise, before any of them is needed."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as e:
        raise ValueError(
            f"{path}: {name} holds {kind.name} blocks, which the package gguf cannot dequantise: make the"
            " file in another type with llama-quantize"
        ) from e


def _dequantize(path: Path, offset: int, num_bytes: int, shape: tuple[int, ...], kind: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    raw = map_tensor(path, offset, (num_bytes,), torch.uint8).numpy()
    rows = raw.reshape(-1, num_bytes // max(1, int(np.prod(shape[:-1]))))
    return torch.from_numpy(dequantize(rows, kind).astype(np.float32, copy=False)).view(shape)
