"""From named weights to a model: a state dict that reads on demand, and the checks before loading."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from ppl_eval.checkpoints.quantized_tensors import check_packed_for, is_quantized, move
from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.config import activity
from ppl_eval.models.decoder import Decoder
from ppl_eval.models.engines import scorable

SHOWN_KEYS = 10


class LazyStateDict(Mapping[str, torch.Tensor]):
    """A state dict whose tensors are read (and converted) when they are asked for, and not kept.

    A rank that needs a slice of each weight, or moves them to a device one by one, never holds them all.
    ``dict(lazy)`` reads everything. Shapes and dtypes are known without reading: ``lazy.meta[name]``.
    """

    def __init__(self) -> None:
        """Make an empty state dict."""
        self.meta: dict[str, torch.Tensor] = {}
        self._read: dict[str, Callable[[], torch.Tensor]] = {}

    def add(self, name: str, meta: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        """Register a tensor: ``meta`` has its shape and dtype, ``read`` returns its values."""
        self.meta[name] = meta
        self._read[name] = read

    def reader(self, name: str) -> Callable[[], torch.Tensor]:
        """Return the function that reads ``name``, for wrapping it in another."""
        return self._read[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read the tensor ``name``."""
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        """Iterate over names, in the order of the files."""
        return iter(self.meta)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.meta)

    def __contains__(self, name: object) -> bool:
        """Return whether the tensor is there, without reading it."""
        return name in self.meta


def under_own_names(decoder: Decoder, state_dict: LazyStateDict) -> tuple[LazyStateDict, list[str]]:
    """Return a checkpoint under the names of the decoder's module, and notes (``Decoder.own_weights``)."""
    found = decoder.own_weights(state_dict.meta, state_dict.reader)
    if found is None:
        return state_dict, []
    weights, notes = found
    renamed = LazyStateDict()
    for name, (meta, read) in weights.items():
        renamed.add(name, meta, read)
    return renamed, notes


def load_into(
    model: nn.Module | Decoder,
    state_dict: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weights: WeightsHash | None = None,
    pack: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
) -> list[str]:
    """Give a model that was built on the meta device its weights, without a second copy of any of them.

    Args:
        model: decoder on the meta device; tensors that no checkpoint holds are computed here.
        state_dict: weights under the model's names. Weights that have the right dtype and device are
            assigned as they are (a mapped file stays mapped); the others are converted one at a time.
        dtype: of all floating-point weights. Quantised weights keep theirs.
        device: where the weights go.
        weights: takes the hash of what is read.
        pack: gets every plain weight by its name, on the device, and returns what takes its place
            (``quantization.quantize.Packing``).

    Returns:
        Notes: everything that was adjusted.

    Raises:
        ValueError: if keys are missing, unexpected, or of the wrong shape (all of them counted, the first ten
            named), a tied head that differs from the embedding, whole numbers for weights, or a quantised
            weight of another dtype or packed for another device.
    """
    notes: list[str] = []
    decoder = scorable(model)
    names = check_state_dict(decoder, state_dict, dtype=dtype, notes=notes)
    check_packed_for(meta_of(state_dict), device)
    own = decoder.own_dtypes(dtype)
    notes += note_conversions(state_dict, names, dtype, own)
    loaded: dict[str, torch.Tensor] = {}
    for name in names:
        activity.tick()
        tensor = state_dict[name]
        with weights.reading(name, tensor) if weights else nullcontext():
            if is_quantized(tensor) or not tensor.is_floating_point():
                loaded[name] = move(tensor, device)
            else:
                loaded[name] = tensor.to(device=device, dtype=own.get(name, dtype))
        del tensor
        if pack is not None:
            loaded[name] = pack(name, loaded[name])
    decoder.module.load_state_dict(loaded, strict=True, assign=True)
    decoder.init_buffers(device)
    assert_materialised(decoder.module)
    return notes


def note_conversions(
    state_dict: Mapping[str, torch.Tensor],
    names: list[str],
    dtype: torch.dtype,
    own: Mapping[str, torch.dtype],
) -> list[str]:
    """Return one note per dtype that loading converts from; no tensor is read.

    Args:
        state_dict: the checkpoint.
        names: what is loaded.
        dtype: of the run.
        own: dtypes of weights that stay in another (``Decoder.own_dtypes``), of which no note is made.
    """
    meta = meta_of(state_dict)
    converted: dict[torch.dtype, int] = {}
    for name in names:
        tensor = meta[name]
        plain = not is_quantized(tensor) and tensor.is_floating_point() and name not in own
        if plain and tensor.dtype != dtype:
            converted[tensor.dtype] = converted.get(tensor.dtype, 0) + 1
    return [
        f"{num_weights} weights converted from {short_dtype(source)} to {short_dtype(dtype)}"
        for source, num_weights in sorted(converted.items(), key=str)
    ]


def check_state_dict(
    model: nn.Module | Decoder,
    state_dict: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    notes: list[str],
) -> list[str]:
    """Return the names to load, once all names, shapes and quantised dtypes agree with the model's.

    Raises:
        ValueError: see ``load_into``.
    """
    decoder = scorable(model)
    embedding, head = f"{decoder.embedding_name}.weight", f"{decoder.head_name}.weight"
    wanted = {name: parameter.shape for name, parameter in decoder.module.state_dict().items()}
    meta = meta_of(state_dict)
    missing = [name for name in wanted if name not in meta]
    unexpected = [name for name in meta if name not in wanted]
    wrong = [
        f"{name} (checkpoint {list(meta[name].shape)}, model {list(shape)})"
        for name, shape in wanted.items()
        if name in meta and meta[name].shape != shape
    ]
    if head in unexpected and decoder.is_tied:
        unexpected.remove(head)
        notes.append(check_tied_head(state_dict, embedding, head))
    faults = [
        fault
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("wrongly shaped", wrong))
        for fault in name_some(kind, keys)
    ]
    if faults:
        if head in missing and embedding in meta:
            faults.append(
                f"  hint: a checkpoint without {head} has a head tied to its embedding, and the "
                "configured model has an "
                "untied one: choose the builder of a tied model"
            )
        raise ValueError("the checkpoint does not fit the model:\n" + "\n".join(faults))
    whole = [name for name in wanted if not is_quantized(meta[name]) and not meta[name].is_floating_point()]
    if whole:
        kinds = ", ".join(sorted({short_dtype(meta[name].dtype) for name in whole}))
        raise ValueError(
            f"the checkpoint stores whole numbers ({kinds}) where the model has weights, without a known form"
            " of quantisation; take the full-precision checkpoint and set `quantizer`:\n"
            + "\n".join(name_some("whole numbers", whole))
        )
    other = sorted({short_dtype(t.dtype) for t in meta.values() if is_quantized(t) and t.dtype != dtype})
    if other:
        raise ValueError(
            f"the checkpoint was quantised for {', '.join(other)} activations: set dtype={'|'.join(other)} "
            f"(the config says {short_dtype(dtype)})"
        )
    return list(wanted)


def meta_of(state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return shapes and dtypes by name, without reading what is read on demand."""
    return state_dict.meta if isinstance(state_dict, LazyStateDict) else state_dict


def check_tied_head(state_dict: Mapping[str, torch.Tensor], embedding: str, head: str) -> str:
    """Check that a tied model's checkpoint has no other head than its embedding: it would be lost.

    Returns:
        The note that says so.

    Raises:
        ValueError: if the checkpoint's head is another matrix.
    """
    if embedding in state_dict and not torch.equal(state_dict[head], state_dict[embedding]):
        raise ValueError(
            "the checkpoint has a head (lm_head.weight / output.weight) that differs from its embedding, "
            "but the configured model ties the two: choose the builder of an untied model, and where "
            "config.json says tie_word_embeddings: true, set it to false there (the weights are not tied, "
            "and transformers does not tie them either)"
        )
    return "the checkpoint repeats its tied embedding as lm_head.weight: compared, equal, not loaded twice"


def name_some(kind: str, keys: list[str]) -> list[str]:
    """Return one line that counts ``keys`` and names the first ten; no line when there are none."""
    if not keys:
        return []
    more = f" ... and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return [f"  {kind} ({len(keys)}): {', '.join(keys[:SHOWN_KEYS])}{more}"]


def assert_materialised(model: nn.Module) -> None:
    """Check that nothing is left on the meta device: it would give noise instead of an error."""
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, f"still on the meta device after loading: {left[:SHOWN_KEYS]}"


def short_dtype(dtype: torch.dtype) -> str:
    """Return the dtype as configs write it: bf16, fp32, fp16, fp64, or torch's name."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
