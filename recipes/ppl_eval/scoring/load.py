"""The model of a run: built without memory, filled from the checkpoint, quantised where asked, made ready to
score."""

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtune import training

from ppl_eval.checkpoints.lazy_state_dict import (
    LazyStateDict,
    check_state_dict,
    load_into,
    note_conversions,
    under_own_names,
)
from ppl_eval.checkpoints.load import LoadedCheckpoint
from ppl_eval.checkpoints.quantized_tensors import is_quantized
from ppl_eval.checkpoints.weights_hash import WeightsHash
from ppl_eval.config import activity
from ppl_eval.config.components import instantiate
from ppl_eval.config.settings import Settings
from ppl_eval.data.token_data import TokenData
from ppl_eval.models import live
from ppl_eval.models.decoder import Asked, Decoder
from ppl_eval.models.engines import scorable
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.quantization.awq import Share, run_alone
from ppl_eval.quantization.quantize import (
    Packing,
    QuantizationReport,
    is_calibrated,
    quantize,
    refuse_quantized,
)
from ppl_eval.scoring import concurrency
from ppl_eval.scoring import live as scoring_live
from ppl_eval.scoring import split as parallel
from ppl_eval.scoring.nll import ScoringModel
from ppl_eval.tokenization.tokenizer import TextEncoder


@dataclass
class BuiltModel:
    """A model that is ready to score.

    Attributes:
        scorer: the decoder with its head.
        num_parameters: parameters of the decoder, tied ones counted once, before quantisation.
        weights: the hash of what this rank read.
        quantization: what was quantised, or None.
        notes: everything the person should know about how it was loaded.
        reference: the model that it is compared with, if there is one.
    """

    scorer: ScoringModel
    num_parameters: int
    weights: WeightsHash
    quantization: QuantizationReport | None
    notes: list[str] = field(default_factory=list)
    reference: "BuiltModel | None" = None

    @property
    def scorers(self) -> list[ScoringModel]:
        """All that run in a forward: this model's, and the reference's."""
        return [self.scorer, *(() if self.reference is None else self.reference.scorers)]

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks: the engine, and a digest of weights that were calibrated."""
        digest = self.quantization and self.quantization.digest
        found = {**self.scorer.model.facts(), **({"calibrated weights": digest} if digest else {})}
        return found if self.reference is None else {**found, "reference": self.reference.facts()}


def build_on_meta(settings: Settings, dtype: torch.dtype) -> Decoder:
    """Build the config's model without weights.

    Raises:
        ValueError: if the component is not a text decoder.
    """
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = instantiate("model", settings.model)
    try:
        return scorable(model)
    except ValueError as error:
        raise ValueError(f"model._component_ is {settings.model._component_!r}: {error}") from error


def match_family(decoder: Decoder, checkpoint: LoadedCheckpoint, settings: Settings) -> tuple[str, list[str]]:
    """Correct what an engine computes differently, then hold the model against config.json.

    Args:
        decoder: as built, on meta: before weights, shards and quantisation.
        checkpoint: opened, for its config.json.
        settings: for the builder's name, ``config_check`` and the checkpointer's ``model_type``.

    Returns:
        The verdict of the check and notes.

    Raises:
        ValueError: if the family is not supported, or the model differs from config.json.
    """
    if live.is_lent():
        return "none", [scoring_live.NOTE]
    model_type = settings.checkpointer.get("model_type")
    asked = Asked(settings.model._component_, settings.config_check, model_type)
    return decoder.check(checkpoint.hf_config, asked)


def check_fit(
    model: Decoder,
    max_seq_len: int,
    data: TokenData,
    encoder: TextEncoder,
    prefix_token: int | None = None,
) -> list[str]:
    """Refuse windows longer than the model's context, and tokens that the model does not have.

    What counts is the ids in the data: a tokenizer may name more than the model was given.

    Args:
        model: for its context and its vocabulary.
        max_seq_len: tokens of a window.
        data: the tokens to be scored.
        encoder: their tokenizer.
        prefix_token: what goes before windows that have a prefix.

    Returns:
        Notes for the result: at most one line.

    Raises:
        ValueError: if one of them does not fit.
    """
    if max_seq_len > model.max_seq_len:
        raise ValueError(
            f"protocol.max_seq_len is {max_seq_len}, but the model was built for {model.max_seq_len} tokens;"
            f" use protocol.max_seq_len={model.max_seq_len} or less{model.longer_windows}"
        )
    model_vocab = model.vocab_size
    belongs = (
        f"the model's vocabulary has {model_vocab} (0 to {model_vocab - 1}); the tokenizer"
        + (f" of {encoder.vocab_size} ids" if encoder.vocab_size > model_vocab else "")
        + " or the data belongs to another model, or the model was not resized for tokens that were added"
    )
    if prefix_token is not None and prefix_token >= model_vocab:
        raise ValueError(
            f"the token before each window is {encoder.name_of(prefix_token)} (id {prefix_token}), but"
            f" {belongs}"
        )
    found = data.first_id_beyond(model_vocab)
    if found is not None:
        document, position, token = found
        raise ValueError(
            f"document {document} holds the token {encoder.name_of(token)} (id {token}) at position"
            f" {position} (both count from 0), but {belongs}"
        )
    if encoder.vocab_size <= model_vocab:
        return []
    highest = encoder.vocab_size - 1
    return [
        f"the tokenizer names ids up to {highest} ({encoder.name_of(highest)}), the model's vocabulary has"
        f" {model_vocab}; no token of the data is beyond it"
    ]


def prepare_for_device(decoder: Decoder | nn.Module, device: torch.device, compiled: bool) -> None:
    """Choose kernels that suit the device; a compiler makes its own."""
    if not compiled:
        scorable(decoder).prepare(device)


@dataclass(frozen=True)
class Placement:
    """Where a model computes, and in which dtype.

    Attributes:
        device: of this rank.
        dtype: of the weights.
        dims: degrees of parallelism.
        mesh: what ``dims.build_mesh`` returned.
    """

    device: torch.device
    dtype: torch.dtype
    dims: ParallelDims
    mesh: DeviceMesh | None


def load_model(
    decoder: Decoder,
    checkpoint: LoadedCheckpoint,
    settings: Settings,
    placement: Placement,
    *,
    batches: list[torch.Tensor] | None = None,
    share: Share = run_alone,
    compared: bool = False,
) -> BuiltModel:
    """Fill a model built on meta, quantise it, split it over the mesh, and wrap it for scoring.

    ``batches`` and ``share`` are the calibration text and the division of its work: see ``quantize``.
    ``compared`` is whether it is one of two that are compared: their logits share the memory.

    Raises:
        ValueError: if checkpoint and model do not fit, the quantiser cannot be used, or the model cannot be
            split so.
    """
    if live.is_lent():
        return _take_live(decoder, settings, placement)
    device, dtype, dims = placement.device, placement.dtype, placement.dims
    num_parameters = count_parameters(decoder.module)
    state_dict, renamed = under_own_names(decoder, checkpoint.state_dict)
    decoder.module.eval().requires_grad_(False)
    prepare_for_device(decoder, device, settings.compile)
    whole = settings.quantizer is not None or any(map(is_quantized, state_dict.meta.values()))
    if whole:
        dims.check_quantized()
    _check_calibration(decoder, batches)
    whole = whole or not (dims.fsdp_enabled or dims.tp_enabled)

    notes = decoder.notes_on(dtype) + renamed
    report, weights = None, WeightsHash()
    if whole:
        packing = packing_of(decoder, state_dict, settings.quantizer, device, dtype)
        notes += load_into(decoder, state_dict, dtype=dtype, device=device, weights=weights, pack=packing)
        decoder.module.requires_grad_(False)
        if packing is not None:
            report = packing.report()
        elif settings.quantizer is not None:
            report = quantize(decoder, settings.quantizer, device, batches=batches, share=share)
        notes += [] if report is None else report.notes
        model = _split(decoder, settings, placement, shard=False, compared=compared)
    else:
        names = check_state_dict(decoder, state_dict, dtype=dtype, notes=notes)
        notes += note_conversions(state_dict, names, dtype, decoder.own_dtypes(dtype))
        model = _split(decoder, settings, placement, shard=True, compared=compared)
        model.load(state_dict, weights)
    weights.close()
    if settings.compile:
        decoder.compile()
    else:  # A compiler would look at the count in every layer.
        for layer in decoder.layers:
            layer.register_forward_hook(lambda *_: activity.tick())
    return BuiltModel(model.scorer, num_parameters, weights, report, notes + model.notes)


def packing_of(
    decoder: Decoder,
    state_dict: LazyStateDict,
    quantizer: DictConfig | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Packing | None:
    """Return what quantises weights while they are read; None where none is, or the whole model is needed.

    Raises:
        ValueError: if the quantiser cannot be used, or some weights are quantised already.
    """
    if quantizer is None or is_calibrated(quantizer):
        return None
    if any(map(is_quantized, state_dict.meta.values())):
        refuse_quantized()
    return Packing(decoder, quantizer, device, dtype)


def _take_live(decoder: Decoder, settings: Settings, placement: Placement) -> BuiltModel:
    """Make a model that is in memory ready to score: nothing is loaded, and nothing of it is split."""
    device = placement.device
    here = next(decoder.module.parameters()).device
    if here != device and (here.type, here.index or 0) != (device.type, device.index or 0):
        raise ValueError(f"the model is on {here}, and this process evaluates on {device}; move it there")
    weights = scoring_live.hash_weights(decoder.module)
    num_parameters = count_parameters(decoder.module)
    probe = scoring_live.own_nll(decoder.module, device)
    prepare_for_device(decoder, device, settings.compile)
    # Its shards are its own: the mesh of this run divides the windows only.
    model = _split(decoder, settings, placement, shard=False)
    scoring_live.check_agreement(model.scorer, probe, placement.dtype)
    return BuiltModel(model.scorer, num_parameters, weights, None, model.notes)


def _check_calibration(decoder: Decoder, batches: list[torch.Tensor] | None) -> None:
    model_vocab = decoder.vocab_size
    highest = max((int(tokens_BT.max()) for tokens_BT in batches or ()), default=0)
    if highest >= model_vocab:
        raise ValueError(
            f"quantizer.calibration.dataset holds the token id {highest}, but the model's vocabulary has"
            f" {model_vocab}; calibrate on text without that token"
        )


def _split(
    decoder: Decoder, settings: Settings, placement: Placement, *, shard: bool, compared: bool = False
) -> parallel.SplitModel:
    plan = settings.tensor_parallel_plan
    # Concurrent batches have logits at the same time. A CPU cuts the same chunks for one batch at a time:
    # their shape is part of the bits.
    chunks_at_once = concurrency.MAX_CONCURRENT_BATCHES if placement.device.type == "cpu" else 1
    if compared:
        chunks_at_once *= 2  # A chunk of the reference's logits beside one of the model's.
    return parallel.split_model(
        decoder,
        placement.dims,
        placement.mesh,
        placement.device,
        max_logits_bytes=int(settings.max_logits_mib * 2**20) // chunks_at_once,
        softmax=settings.softmax,
        details=settings.per_token,
        shard=shard,
        plan=None if plan is None else instantiate("tensor_parallel_plan", plan),
        reshard_after_forward=settings.fsdp_reshard_after_forward,
        cpu_offload=settings.fsdp_cpu_offload,
        whole_layers=settings.compile,
    )


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
