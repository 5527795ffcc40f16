"""What a loaded model is made of on a CPU."""

from functools import partial

import pytest
import torch

from helpers.tiny import VOCAB_SIZE, write_config
from ppl_eval.checkpoints.load import load_state_dict
from ppl_eval.config.settings import read_settings
from ppl_eval.models.cpu_rotary import WholeRotary
from ppl_eval.parallel.parallel_dims import ParallelDims
from ppl_eval.scoring import concurrency
from ppl_eval.scoring import load as models
from ppl_eval.scoring.nll import rows_per_chunk


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
