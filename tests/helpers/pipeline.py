"""A tiny random Llama in two libraries, and the scoring loop of one process: what parity tests compare."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.tiny_tokenizers import TINY_VOCAB_SIZE
from ppl_eval.data import TextSource
from ppl_eval.data.sources import EncodeRequest
from ppl_eval.data.token_data import TokenData, open_tokens, prepare_tokens
from ppl_eval.metrics import figures as metrics
from ppl_eval.metrics.denominators import CoveredText
from ppl_eval.metrics.totals import Totals, WindowScores
from ppl_eval.protocols.base import Protocol
from ppl_eval.protocols.batches import WindowBatches
from ppl_eval.protocols.bos import check_bos_tokens, prefix_token
from ppl_eval.protocols.plan import make_plan
from ppl_eval.scoring.nll import ScoringModel, window_scores
from ppl_eval.tokenization.tokenizer import TextEncoder

MAX_CONTEXT = 512


def tiny_llama() -> tuple[LlamaForCausalLM, TransformerDecoder]:
    """The same random float32 weights as a transformers model and as a torchtune decoder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        rope_theta=10_000.0,
        # Wide weights, so that tokens differ in probability and a wrong context shows.
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
    )
    theirs = LlamaForCausalLM(config).float().eval()
    decoder = llama3(
        vocab_size=TINY_VOCAB_SIZE,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=32,
        max_seq_len=MAX_CONTEXT,
        rope_base=10_000,
        intermediate_dim=48,
        norm_eps=config.rms_norm_eps,
    ).eval()
    decoder.load_state_dict(hf_to_tune(theirs.state_dict(), num_heads=4, num_kv_heads=2, dim=32))
    return theirs, decoder


class Scored(NamedTuple):
    """What one process finds."""

    totals: Totals
    data: TokenData
    windows: WindowScores
    figures: dict[str, float]
    notes: list[str]

    def figures_of(self, covered: CoveredText) -> dict[str, Any]:
        """The figures that divide by text."""
        num_bytes, num_words = int(covered.num_bytes_D.sum()), int(covered.num_words_D.sum())
        return metrics.figures(self.totals, num_bytes, num_words)


def texts(*documents: str) -> TextSource:
    """Documents at hand as a source."""

    def read() -> Iterator[str]:
        yield from documents

    return TextSource("texts", {}, read)


@torch.no_grad()
def score(
    protocol: Protocol,
    source: TextSource,
    encoder: TextEncoder,
    decoder: TransformerDecoder,
    cache: Path,
    batch_size: int = 3,
) -> Scored:
    """Score a source as the recipe does, on one process."""
    protocol = protocol.for_tokenizer(encoder.adds_bos)
    request = EncodeRequest(encoder, protocol.join, protocol.bos, protocol.word_separator)
    data = open_tokens(prepare_tokens(source, request, cache))
    notes = check_bos_tokens(protocol, data, encoder)
    plan = make_plan(protocol, data.offsets_D1, batch_size)
    batches = WindowBatches(plan, data, prefix_token(protocol, encoder))
    model = ScoringModel(decoder, max_logits_bytes=1 << 20)
    totals, found, ids = Totals(), [], []
    for index in range(len(batches)):
        batch = batches[index]
        nll_N, correct_N = model(batch.tokens_BT, batch.labels_BT)
        scores = window_scores(nll_N, correct_N, batch.labels_BT, len(batch.window_ids_B))
        totals.add(scores, protocol.window_weights(plan.locate(batch.window_ids_B)))
        found.append(scores)
        ids.append(batch.window_ids_B)
    order = np.argsort(np.concatenate(ids))
    columns = zip(*(scores[:4] for scores in found), strict=True)
    windows = WindowScores(*(np.concatenate(column)[order] for column in columns))
    assert totals.num_tokens == plan.expected_targets()
    figures = protocol.figures(totals.scored_sums(int(data.num_words_D.sum())))
    return Scored(totals, data, windows, figures, notes)
