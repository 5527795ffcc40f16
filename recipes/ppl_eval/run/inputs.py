"""What a run scores: tokenizer, protocol, token stream and plan, read from the config and held against each
other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_eval.config import paths
from ppl_eval.config.components import instantiate
from ppl_eval.config.settings import Settings
from ppl_eval.data import token_data as tokens
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import TokenData
from ppl_eval.distributed.rendezvous import World
from ppl_eval.protocols import batches, bos
from ppl_eval.protocols.base import Protocol
from ppl_eval.protocols.plan import Plan, make_plan
from ppl_eval.tokenization.tokenizer import TextEncoder, without_bos, wrap_tokenizer


@dataclass(frozen=True)
class Inputs:
    """What a run scores.

    Attributes:
        encoder: the tokenizer.
        protocol: how documents become windows.
        prefix_token: the token before windows that have a prefix, or None.
        source: where the documents come from.
        data: their tokens.
        plan: the windows and batches.
        expected_tokens: targets that the plan says must be scored.
        notes: what the person should know.
    """

    encoder: TextEncoder
    protocol: Protocol
    prefix_token: int | None
    source: Any
    data: TokenData
    plan: Plan
    expected_tokens: int
    notes: list[str]


def read_inputs(settings: Settings, world: World) -> Inputs:
    """Read all that does not depend on the model; texts are tokenised by one process of each node.

    Raises:
        ValueError: if something is missing or does not fit.
    """
    protocol = _read_protocol(settings)
    assert settings.tokenizer is not None
    tokenizer = without_bos(settings.tokenizer) or instantiate("tokenizer", settings.tokenizer)
    encoder = wrap_tokenizer(tokenizer, settings.tokenizer, protocol.special_tokens)
    protocol = protocol.for_tokenizer(encoder.adds_bos)
    prefix_token = bos.prefix_token(protocol, encoder)
    source = instantiate("dataset", settings.dataset)

    def prepare() -> str:
        request = EncodeRequest(encoder, protocol.join, protocol.bos, protocol.word_separator)
        return str(tokens.prepare_tokens(source, request, paths.home() / "tokens"))

    data = tokens.open_tokens(Path(world.once_per_node("tokens", prepare)))
    notes = [*data.notes, *bos.check_bos_tokens(protocol, data, encoder)]
    plan = make_plan(protocol, data.offsets_D1, settings.batch_size, settings.max_windows)
    expected_tokens = plan.expected_targets() - batches.masked_targets(plan, data)
    return Inputs(
        encoder, protocol, prefix_token, source, data, plan, expected_tokens, [*notes, *plan.notes()]
    )


def _read_protocol(settings: Settings) -> Protocol:
    protocol = instantiate("protocol", settings.protocol)
    if not isinstance(protocol, Protocol):
        raise ValueError(
            f"protocol._component_ is {settings.protocol['_component_']!r}, which built a"
            f" {type(protocol).__name__}, not a ppl_eval.protocols.base.Protocol"
        )
    return protocol
