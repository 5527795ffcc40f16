"""The model of a run: built without memory, filled from the checkpoint, quantised where asked, made ready to
score."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torchtune import training
from torchtune.modules import TransformerDecoder

from ppl_eval.checkpoints import LoadedCheckpoint
from ppl_eval.quantization import QuantizationReport, quantize
from ppl_eval.scoring import ScoringModel
from ppl_eval.settings import Settings, instantiate
from ppl_eval.weights import load_into


@dataclass
class BuiltModel:
    """A model that is ready to score.

    Attributes:
        scorer: the decoder with its head.
        num_parameters: parameters of the decoder, tied ones counted once, before quantisation.
        quantization: what was quantised, or None.
        notes: everything the person should know about how it was loaded.
    """

    scorer: ScoringModel
    num_parameters: int
    quantization: QuantizationReport | None
    notes: list[str] = field(default_factory=list)


def build_on_meta(settings: Settings, dtype: torch.dtype) -> TransformerDecoder:
    """Build the config's model without weights.

    Raises:
        ValueError: if the component is not a text decoder.
    """
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = instantiate("model", settings.model)
    if not isinstance(model, TransformerDecoder):
        raise ValueError(
            f"model._component_ is {settings.model._component_!r}, which builds a {type(model).__name__}; it"
            " must build a torchtune TransformerDecoder, a text model without adapters"
        )
    return model


def check_fit(model: TransformerDecoder, max_seq_len: int, vocab_size: int) -> None:
    """Refuse windows longer than the model's context, and a tokenizer with ids that the model does not have.

    Raises:
        ValueError: if one of them does not fit.
    """
    if max_seq_len > model.max_seq_len:
        raise ValueError(
            f"protocol.max_seq_len is {max_seq_len}, but the model was built for {model.max_seq_len} tokens;"
            f" use protocol.max_seq_len={model.max_seq_len} or less, or raise model.max_seq_len if the"
            " checkpoint was trained for more"
        )
    model_vocab = model.tok_embeddings.num_embeddings
    if vocab_size > model_vocab:
        raise ValueError(
            f"the tokenizer has {vocab_size} ids, but the model's vocabulary has {model_vocab}: the tokenizer"
            " belongs to another model"
        )


def load_model(
    decoder: TransformerDecoder,
    checkpoint: LoadedCheckpoint,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
) -> BuiltModel:
    """Fill a model built on meta, quantise it, and wrap it for scoring.

    Raises:
        ValueError: if checkpoint and model do not fit, or the quantiser cannot be used.
    """
    num_parameters = count_parameters(decoder)
    notes = load_into(decoder, checkpoint.state_dict, dtype=dtype, device=device)
    decoder.eval().requires_grad_(False)
    report = None
    if settings.quantizer is not None:
        report = quantize(decoder, settings.quantizer, device)
        notes += report.notes
    scorer = ScoringModel(decoder, int(settings.max_logits_mib * 2**20))
    if settings.compile:
        training.compile_model(decoder)
    return BuiltModel(scorer, num_parameters, report, notes)


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
