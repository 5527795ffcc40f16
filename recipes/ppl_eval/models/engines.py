"""The engines: which class scores what a config's ``model`` section built."""

from torch import nn
from torchtune.modules import TransformerDecoder

from ppl_eval.models.decoder import Decoder
from ppl_eval.models.torchtune_decoder import TorchtuneDecoder


def scorable(model: nn.Module | Decoder) -> Decoder:
    """Return the decoder that scores a model; one that is a decoder already as it is.

    Raises:
        ValueError: if no engine knows it.
    """
    if isinstance(model, Decoder):
        return model
    if isinstance(model, TransformerDecoder):
        return TorchtuneDecoder(model)
    raise ValueError(
        f"a {type(model).__name__} cannot be scored; the builder must return a torchtune TransformerDecoder,"
        " a text model without adapters"
    )
