"""A model in memory: scored with the bits that its checkpoint has, between two training steps, and given back
as it was."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchtune.models.llama3_2 import llama3_2
from torchtune.training import FullModelHFCheckpointer

from helpers.processes import run_ranks
from helpers.tiny import SHAPE, write_config
from ppl_eval import InputError, evaluate

OPTIONS = {"max_windows": 7, "protocol.max_seq_len": 32}


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("live") / "config.yaml", tiny.folder, tiny.text)


@pytest.fixture(scope="module")
def expected(config, tmp_path_factory):
    """The result of the checkpoint."""
    folder = tmp_path_factory.mktemp("expected")
    return evaluate(config, overrides={**OPTIONS, "output_dir": folder}).content


def decoder_of(folder, scratch):
    """The tiny model, as torchtune loads it."""
    checkpointer = FullModelHFCheckpointer(
        str(folder), checkpoint_files=["model.safetensors"], model_type="LLAMA3_2", output_dir=str(scratch)
    )
    model = llama3_2(**SHAPE)
    model.load_state_dict(checkpointer.load_checkpoint()["model"])
    return model


def description(model):
    """Everything about the modules that an evaluation may touch and must restore."""
    return [
        (
            name,
            type(module),
            module.training,
            {key: id(value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")},
            {key: id(value) for key, value in module._modules.items()},
            list(module._forward_hooks),
        )
        for name, module in model.named_modules()
    ] + [(name, p.requires_grad, type(p)) for name, p in model.named_parameters()]


def train_step(model, seed):
    """One step of plain gradient descent."""
    torch.manual_seed(seed)
    model.train()
    tokens = torch.randint(0, 300, (2, 20))
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None


def test_it_has_the_bits_of_its_checkpoint_and_stays_what_it_was(tiny, config, expected, tmp_path):
    model = decoder_of(tiny.folder, tmp_path).train()
    model.layers[0].eval()
    model.norm.requires_grad_(False)
    twin = copy.deepcopy(model)
    before = description(model)
    result = evaluate(config, overrides=OPTIONS | {"output_dir": tmp_path / "out"}, model=model)
    assert description(model) == before
    assert "unembed" not in vars(model)
    for name in ("nll_sum_hex", "coverage", "protocol", "dataset"):
        assert result[name] == expected[name]
    assert result["model"]["checkpoint"]["weights_hash"] == expected["model"]["checkpoint"]["weights_hash"]
    assert any("as it was in memory" in note for note in result["notes"])
    # The next training step is the one that an undisturbed model makes.
    train_step(model, 1)
    train_step(twin, 1)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    # And other weights are another number.
    again = evaluate(config, overrides=OPTIONS | {"output_dir": tmp_path / "out"}, model=model)
    assert again["nll_sum_hex"] != expected["nll_sum_hex"]
    assert again["plan"]["resumed_batches"] == 0


def test_it_is_given_back_after_an_error(tiny, config, tmp_path):
    model = decoder_of(tiny.folder, tmp_path)
    before = description(model)
    with torch.no_grad():
        model.norm.scale.fill_(float("nan"))
    with pytest.raises(InputError, match="differ by nan"):
        evaluate(config, overrides=OPTIONS, model=model)
    assert description(model) == before


def test_a_tokenizer_in_memory_takes_the_section_s_place(tiny, config, expected, tmp_path, private_home):
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer
    from transformers import PreTrainedTokenizerFast

    model = decoder_of(tiny.folder, tmp_path)
    json_path, config_path = (str(tiny.folder / f"tokenizer{part}.json") for part in ("", "_config"))
    given = {
        "dataset": {"_component_": "ppl_eval.data.text_files", "paths": [str(tiny.text)]},
        "protocol": {"_component_": "ppl_eval.protocols.disjoint", "max_seq_len": 32},
        "batch_size": 2,
        "max_windows": 7,
    }
    for tokenizer in (
        HuggingFaceBaseTokenizer(json_path, tokenizer_config_json_path=config_path),
        PreTrainedTokenizerFast.from_pretrained(tiny.folder),
    ):
        assert evaluate(given, model=model, tokenizer=tokenizer)["nll_sum_hex"] == expected["nll_sum_hex"]
    with pytest.raises(InputError, match="the tokenizer is a str"):
        evaluate(given, model=model, tokenizer="gpt2")


def test_what_a_model_in_memory_cannot_follow_is_refused(tiny, config, tmp_path):
    model = decoder_of(tiny.folder, tmp_path)
    for overrides, message in (
        ({"dtype": "bf16"}, "dtype: a model in memory"),
        ({"resume": "auto"}, "resume: a model in memory"),
        ({"tensor_parallel_dim": 2}, "tensor_parallel_dim: a model in memory"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(config, overrides=OPTIONS | overrides, model=model)
    with pytest.raises(InputError, match="TransformerDecoder"):
        evaluate(config, model=torch.nn.Linear(2, 2))
    # A config cannot ask for a model that nobody lends.
    with pytest.raises(InputError, match="there is none"):
        evaluate(config, overrides=["model=null", "model._component_=ppl_eval.models.live.in_memory"])
    output = model.unembed
    model.unembed = lambda hidden: 2 * output(hidden)
    with pytest.raises(InputError, match="own forward and the scorer differ"):
        evaluate(config, overrides=OPTIONS, model=model)


@run_ranks(2)
def test_under_ddp_and_fsdp_between_training_steps(tiny, config, expected, tmp_path):
    scratch = tmp_path / str(dist.get_rank())
    scratch.mkdir()
    replica = DistributedDataParallel(decoder_of(tiny.folder, scratch))
    sharded = decoder_of(tiny.folder, scratch)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    for number, model in enumerate((replica, sharded)):
        own = OPTIONS | {"output_dir": str(tmp_path / f"out{number}")}
        before = description(model)
        result = evaluate(config, overrides=own, model=model)
        assert description(model) == before
        assert result["nll_sum_hex"] == expected["nll_sum_hex"]
        hashes = [content["model"]["checkpoint"]["weights_hash"] for content in (result.content, expected)]
        assert hashes[0] == hashes[1]
        train_step(model, 3)
        after = evaluate(config, overrides=own, model=model)
        assert after["nll_sum_hex"] != expected["nll_sum_hex"]
        train_step(model, 4)
