"""Every shipped YAML: found by glob, so that a file which nobody listed is tested too."""

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from helpers.published import BY_CONFIG, PUBLISHED, SMOLLM2, Published
from ppl_eval.config.components import check_arguments, instantiate, resolve_component
from ppl_eval.config.kinds import Named
from ppl_eval.config.settings import read_settings
from ppl_eval.config.yaml_files import shipped_configs
from ppl_eval.models.config_check import check_config
from ppl_eval.models.families import correct, family_of
from ppl_eval.scoring.load import build_on_meta, count_parameters

FOLDER = Path(__file__).parents[2] / "configs"
# The one of any model of transformers' is tested in tests/recipe/test_hf_runs.py.
ANY_MODEL = FOLDER / "hf" / "causal_lm.yaml"
PATHS = sorted(set(FOLDER.rglob("*.yaml")) - {ANY_MODEL})
every_config = pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix()
)
BY_BUILDER = {f"torchtune.models.{builder}": entry for builder, entry in PUBLISHED.items()} | {
    "torchtune.models.llama3_2.llama3_2": SMOLLM2,
    # With its length spelled out, for windows beyond the builder's own.
    "torchtune.models.llama3_1.llama3_1": PUBLISHED["llama3_1.llama3_1_8b"],
}


def published_of(path: Path) -> Published:
    """What is known of the checkpoint that a config is for."""
    name = f"{path.parent.name}/{path.stem.partition('_ppl')[0]}"
    return BY_CONFIG.get(name) or BY_BUILDER[OmegaConf.load(path).model._component_]


GIB = 2**30
# Activations, logits and CUDA's context, rounded up; and the sizes of devices that people have, in GiB.
WORKING = 3
DEVICES = (8, 16, 24, 40, 48, 80, 140)
INT4 = "torchtune.training.quantization.Int4WeightOnlyQuantizer"


def head_of(path: Path) -> str:
    return path.read_text().split("\n\n", 1)[0] + "\n"


@functools.cache
def built(section: str) -> tuple[torch.nn.Module, int]:
    """The model of a `model:` section, corrected, and its parameter count; built once a section."""
    path = next(path for path in PATHS if model_section(path) == section)
    settings = read_settings(["--config", str(path)])
    model = build_on_meta(settings, torch.bfloat16).module
    num_parameters = count_parameters(model)
    builder = settings.model._component_
    correct(model, builder, published_of(path).config)
    return model, num_parameters


def model_section(path: Path) -> str:
    return OmegaConf.to_yaml(OmegaConf.load(path).model)


@every_config
def test_config(path):
    settings = read_settings(["--config", str(path)])  # keys all known, this project's components checked
    for section in ("model", "tokenizer", "checkpointer", "dataset", "protocol", "quantizer"):
        if getattr(settings, section) is not None:
            component = getattr(settings, section)._component_
            assert callable(resolve_component(Named(section, section, component)))
    check_arguments("tokenizer", settings.tokenizer)
    assert instantiate("dataset", settings.dataset) is not None
    protocol = instantiate("protocol", settings.protocol)

    builder = settings.model._component_
    model, num_parameters = built(model_section(path))
    entry = published_of(path)
    assert num_parameters == entry.num_parameters
    assert check_config(model, builder, entry.config, settings.checkpointer.model_type) == []
    assert settings.checkpointer.model_type == family_of(builder).model_type
    assert protocol.max_seq_len <= model.max_seq_len


@every_config
def test_head_says_what_a_user_must_know(path):
    name = path.relative_to(FOLDER).with_suffix("").as_posix()
    head = head_of(path)
    assert head.startswith("# Perplexity of ")
    for line in ("# Weights:  ", "# Launch:   ", "# Memory:   ", "# Expected: "):
        assert head.count(line) == 1, line
    launch = re.search(r"^# Launch: .*$", head, re.MULTILINE)
    assert launch[0].endswith(f"distributed_ppl_eval --config {name}")
    assert ("PET_RDZV_ENDPOINT" in head) == ("--nnodes" in launch[0])
    config = OmegaConf.load(path)
    if path.parent.name != "smollm2":
        assert f"--output-dir {config.checkpointer.checkpoint_dir}" in head
        assert published_of(path).repository in head


@dataclass(frozen=True)
class Need:
    """GiB that a config needs, by arithmetic on the built model: bf16, and a context of CUDA of 1 GiB."""

    weights: float
    packed: float
    largest_piece: float
    working: float


def need_of(path: Path) -> Need:
    config = OmegaConf.load(path)
    model, _ = built(model_section(path))
    numbers = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    layer, embedding = model.layers[0], model.tok_embeddings
    tokens = config.batch_size * config.protocol.max_seq_len
    # At most 6 tensors as wide as the model are alive, and 3 as wide as the MLP.
    activations = tokens * (6 * embedding.embedding_dim + 3 * layer.mlp.w1.out_features) * 2
    # Attention with a cap on scores keeps 256 rows of them, in float32 and 3 at once.
    capped = path.parent.name == "gemma2"
    scores = 3 * config.batch_size * layer.attn.num_heads * 256 * config.protocol.max_seq_len * 4 * capped
    return Need(
        weights=sum(numbers.values()) * 2 / GIB,
        # int4: half a byte a weight, and for each group of 128 a scale and a zero point in bf16.
        packed=(linear * (0.5 + 4 / 128) + (sum(numbers.values()) - linear) * 2) / GIB,
        largest_piece=max(numbers["layers"] // len(model.layers), embedding.weight.numel()) * 2 / GIB,
        working=(activations + scores) / GIB + 64 / 1024 + 1,
    )


@pytest.mark.parametrize(
    "path",
    [path for path in PATHS if path.parent.name != "smollm2" and "k" not in path.stem.split("_")[-1]],
    ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix(),
)
def test_memory_is_right_by_arithmetic_and_fits_the_device(path):
    head, config, need = head_of(path), OmegaConf.load(path), need_of(path)
    (memory,) = re.findall(r"^# Memory:   (.*)$", head, re.MULTILINE)
    (num_nodes, per_node) = re.search(r"(?:--nnodes (\d+) )?--nproc_per_node (\d+)", head).groups()
    num_devices = int(num_nodes or 1) * int(per_node)
    assert need.working <= WORKING, "the allowance covers activations, logits and context"
    whole = math.ceil(need.weights + WORKING)
    if "quantizer" in config:
        # Weights are packed one by one while they are read.
        first = math.ceil(need.packed + need.largest_piece + WORKING)
        expected = f"{first} GiB a device ({need.packed:.1f} GiB of weights, packed while they are read)"
    elif config.get("data_parallel_shard_dim") == -1:
        # One piece is in use while the next is being gathered.
        first = math.ceil(need.weights / num_devices + 2 * need.largest_piece + WORKING)
        expected = f"{first} GiB a device ({need.weights:.0f} GiB of weights, split over {num_devices})"
    else:
        first = whole
        expected = f"{first} GiB a device ({need.weights:.1f} GiB of weights)"
    device = next(size for size in DEVICES if first < size)
    assert memory == f"{expected}; devices of {device} GiB are enough."
    assert config.get("data_parallel_shard_dim") != -1 or config.batch_size == 1


@pytest.mark.parametrize("name", ["128k", "512k"])
def test_memory_table_of_long_windows(name):
    path = FOLDER / "llama3_1" / f"8B_ppl_{name}.yaml"
    head, config, need = head_of(path), OmegaConf.load(path), need_of(path)
    rows = re.findall(r"^# {11,}(\w.*?) (\S+) GiB$", head, re.MULTILINE)
    table = {row.split("  ")[0]: float(gib) for row, gib in rows}
    length, degree = config.protocol.max_seq_len, config.context_parallel_dim
    tokens, gigabytes = length / degree, 2 / GIB
    assert table["weights"] == round(need.weights / degree, 1)
    assert table["hidden states"] == pytest.approx(6 * tokens * 4096 * gigabytes, abs=0.06)
    assert table["MLP"] == pytest.approx(3 * tokens * 14336 * gigabytes, abs=0.06)
    assert table["keys and values"] >= 2 * length * 128 * gigabytes * 2
    total, device = re.search(
        r"^# Memory:   (\d+) GiB a device; devices of (\d+) GiB", head, re.MULTILINE
    ).groups()
    assert sum(table.values()) <= int(total) < int(device)


@every_config
def test_int4(path):
    """An int4 file is its neighbour with a quantiser, and the neighbour's head names the override."""
    config = OmegaConf.load(path)
    if path.stem.endswith("_int4"):
        plain = OmegaConf.load(path.with_stem(path.stem.removesuffix("_int4")))
        assert config.pop("quantizer")._component_ == INT4
        assert config.pop("output_dir") == f"{plain.pop('output_dir')}-int4"
        plain.pop("data_parallel_shard_dim", None)
        assert config == plain
    elif path.stem.endswith("_ppl"):
        (line,) = re.findall(r"^# int4:     (.*)$", head_of(path), re.MULTILINE)
        if not line.startswith("add "):
            assert need_of(path).weights > max(DEVICES)
            return
        overrides = line.removeprefix("add ").split()
        settings = read_settings(["--config", str(path), *overrides])
        assert settings.quantizer._component_ == INT4
        assert settings.data_parallel_shard_dim == 1
        neighbour = path.with_stem(f"{path.stem}_int4")
        if neighbour.is_file():
            assert settings.quantizer == OmegaConf.load(neighbour).quantizer


def test_every_family_has_an_int4_file():
    assert {path.parent for path in PATHS} == {path.parent for path in PATHS if path.stem.endswith("_int4")}


def test_models_of_70b_and_more_are_sharded():
    for path in PATHS:
        config = OmegaConf.load(path)
        large = published_of(path).num_parameters > 65e9
        assert (config.get("data_parallel_shard_dim", 1) == -1) == (large and "quantizer" not in config), path


def test_every_size_that_torchtune_builds_has_a_config():
    components = {OmegaConf.load(path).model._component_ for path in PATHS}
    configured = {component for component in components if component.startswith("torchtune.")}
    # Of Qwen 2.5's base and instruction-tuned builders the base model's is configured; heads name the other.
    wanted = {builder for builder in BY_BUILDER if not builder.endswith("_instruct")}
    assert configured == wanted
    assert {path.parent.name for path in PATHS} == {
        *(
            "llama2",
            "code_llama2",
            "llama3",
            "llama3_1",
            "llama3_2",
            "llama3_3",
            "mistral",
            "gemma",
            "gemma2",
        ),
        *("phi3", "phi4", "qwen2", "qwen2_5", "smollm2"),
        *("gemma3", "granite3", "mistral_nemo", "olmo2", "qwen3", "smollm3"),
    }
    assert BY_CONFIG.keys() <= {f"{path.parent.name}/{path.stem.partition('_ppl')[0]}" for path in PATHS}


def test_configs_are_found_by_name_and_counted(capsys):
    names = set(shipped_configs())
    assert names == {path.relative_to(FOLDER).with_suffix("").as_posix() for path in [*PATHS, ANY_MODEL]}
    with capsys.disabled():
        print(f"\n{len(PATHS)} shipped configs tested")
