"""What a loaded model is made of on a CPU."""

from functools import partial

import numpy as np
import pytest
import torch
from torchtune.models.llama3_2 import llama3_2

from helpers.sources import listed, tokens_of
from helpers.tiny import VOCAB_SIZE, write_config
from helpers.tiny_tokenizers import llama3_tokenizer
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.config.settings import read_settings
from ppl_eval.models.cpu_rotary import WholeRotary
from ppl_eval.models.engines import scorable
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring import concurrency
from ppl_eval.scoring import load as models
from ppl_eval.scoring.nll import rows_per_chunk
from ppl_eval.tokenization.tokenizer import wrap_tokenizer


@pytest.fixture
def load(tiny, tmp_path):
    def load(*overrides):
        config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
        settings = read_settings(["--config", str(config), *overrides])
        checkpoint = load_state_dict(settings.checkpointer)
        decoder = models.build_on_meta(settings, torch.float32)
        alone = ParallelDims(1, 1, 1, 1, world_size=1)
        placement = models.Placement(torch.device("cpu"), torch.float32, alone, None)
        return models.load_model(decoder, checkpoint, settings, placement).scorer

    return load


def test_concurrent_batches_share_the_memory_for_logits(load):
    scorer = load("max_logits_mib=1")
    assert scorer.rows_per_chunk == rows_per_chunk(
        VOCAB_SIZE, torch.float32, 2**20 // concurrency.MAX_CONCURRENT_BATCHES
    )


def test_a_cpu_has_its_own_kernels_unless_a_compiler_makes_them(load):
    for attn in (layer.attn for layer in load().decoder.layers):
        assert isinstance(attn._attention_call, partial)
        assert attn._attention_call.keywords["queries_per_key"] == 2
        assert isinstance(attn.pos_embeddings, WholeRotary)
    for attn in (layer.attn for layer in load("compile=true").decoder.layers):
        assert not isinstance(attn._attention_call, partial)
        assert not isinstance(attn.pos_embeddings, WholeRotary)


@pytest.fixture
def fit(tmp_path):
    """Hold texts in torchtune's Llama 3 tokenizer, which names ids up to 128256, against a vocabulary."""
    encoder = wrap_tokenizer(llama3_tokenizer(tmp_path), {"path": str(tmp_path / "tokenizer.model")})

    def fit(vocab_size, *texts, prefix_token=None):
        with torch.device("meta"):
            model = llama3_2(
                vocab_size=vocab_size,
                num_layers=1,
                num_heads=1,
                num_kv_heads=1,
                embed_dim=8,
                max_seq_len=64,
                intermediate_dim=8,
            )
        data = tokens_of(listed(list(texts)), encoder, tmp_path / "cache")
        assert data.highest_id == int(np.max(data.tokens))
        return models.check_fit(scorable(model), 64, data, encoder, prefix_token)

    return fit


def test_names_beyond_the_vocabulary_that_no_text_uses_are_a_note(fit):
    (note,) = fit(128256, "hello there")
    assert "ids up to 128256 ('<|image|>'), the model's vocabulary has 128256" in note
    assert fit(128257, "hello there") == []


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(fit):
    with pytest.raises(
        ValueError, match=r"document 1 holds the token 'a' \(id 97\) at position 2 .* has 97 "
    ):
        fit(97, "AB", "CDad")
    with pytest.raises(ValueError, match=r"before each window is '<\|begin_of_text\|>' \(id 128000\), but"):
        fit(1000, "AB", prefix_token=128000)
