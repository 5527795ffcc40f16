"""Every shipped YAML: found by glob, so that a file which nobody listed is tested too."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from helpers.published import PUBLISHED, SMOLLM2
from ppl_eval.config.components import check_arguments, instantiate, resolve_component
from ppl_eval.config.settings import read_settings
from ppl_eval.config.yaml_files import shipped_configs
from ppl_eval.models.config_check import check_config
from ppl_eval.models.families import correct, family_of
from ppl_eval.scoring.load import build_on_meta, count_parameters

FOLDER = Path(__file__).parents[2] / "configs"
PATHS = sorted(FOLDER.rglob("*.yaml"))
every_config = pytest.mark.parametrize(
    "path", PATHS, ids=lambda path: path.relative_to(FOLDER).with_suffix("").as_posix()
)
BY_BUILDER = {f"torchtune.models.{builder}": entry for builder, entry in PUBLISHED.items()} | {
    "torchtune.models.llama3_2.llama3_2": SMOLLM2,
    # With its length spelled out, for windows beyond the builder's own.
    "torchtune.models.llama3_1.llama3_1": PUBLISHED["llama3_1.llama3_1_8b"],
}


@functools.cache
def built(section: str) -> tuple[torch.nn.Module, int]:
    """The model of a `model:` section, corrected, and its parameter count; built once a section."""
    path = next(path for path in PATHS if model_section(path) == section)
    settings = read_settings(["--config", str(path)])
    model = build_on_meta(settings, torch.bfloat16)
    num_parameters = count_parameters(model)
    builder = settings.model._component_
    correct(model, builder, BY_BUILDER[builder].config)
    return model, num_parameters


def model_section(path: Path) -> str:
    return OmegaConf.to_yaml(OmegaConf.load(path).model)


@every_config
def test_config(path):
    settings = read_settings(["--config", str(path)])  # keys all known, this project's components checked
    for section in ("model", "tokenizer", "checkpointer", "dataset", "protocol", "quantizer"):
        if getattr(settings, section) is not None:
            component = getattr(settings, section)._component_
            assert callable(resolve_component(component, section))
    check_arguments("tokenizer", settings.tokenizer)
    assert instantiate("dataset", settings.dataset) is not None
    protocol = instantiate("protocol", settings.protocol)

    builder = settings.model._component_
    model, num_parameters = built(model_section(path))
    entry = BY_BUILDER[builder]
    assert num_parameters == entry.num_parameters
    assert check_config(model, builder, entry.config, settings.checkpointer.model_type) == []
    assert settings.checkpointer.model_type == family_of(builder).model_type
    assert protocol.max_seq_len <= model.max_seq_len


@every_config
def test_head_says_what_a_user_must_know(path):
    content = path.read_text()
    name = path.relative_to(FOLDER).with_suffix("").as_posix()
    head = content.split("\n\n", 1)[0]
    assert head.startswith("# Perplexity of ")
    assert f"distributed_ppl_eval --config {name}\n" in head
    for line in ("# Weights:", "# Launch:", "# Memory:", "# Expected:"):
        assert line in head, line
    config = OmegaConf.load(path)
    if path.parent.name != "smollm2":
        assert f"--output-dir {config.checkpointer.checkpoint_dir}" in head
        assert BY_BUILDER[config.model._component_].repository in head


@every_config
def test_int4_differs_from_full_precision_only_by_the_quantiser(path):
    if path.stem.endswith("_int4"):
        plain, packed = (
            OmegaConf.load(path.with_stem(path.stem.removesuffix("_int4"))),
            OmegaConf.load(path),
        )
        assert packed.pop("quantizer")._component_.endswith("Int4WeightOnlyQuantizer")
        assert packed.pop("output_dir") == f"{plain.pop('output_dir')}-int4"
        plain.pop("data_parallel_shard_dim", None)
        assert packed == plain
    elif path.stem.endswith("_ppl"):
        assert path.with_stem(f"{path.stem}_int4").is_file()


def test_models_of_70b_and_more_are_sharded():
    for path in PATHS:
        config = OmegaConf.load(path)
        large = BY_BUILDER[config.model._component_].num_parameters > 65e9
        assert (config.get("data_parallel_shard_dim", 1) == -1) == (large and "quantizer" not in config), path


def test_every_size_that_torchtune_builds_has_a_config():
    configured = {OmegaConf.load(path).model._component_ for path in PATHS}
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
    }


def test_files_are_what_the_generator_writes():
    spec = importlib.util.spec_from_file_location("generate_configs", FOLDER / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    stale = [str(path) for path, content in generator.files().items() if path.read_text() != content]
    assert not stale, f"run `make configs`; these differ from what configs/_generate.py writes: {stale}"


def test_configs_are_found_by_name_and_counted(capsys):
    names = set(shipped_configs())
    assert names == {path.relative_to(FOLDER).with_suffix("").as_posix() for path in PATHS}
    with capsys.disabled():
        print(f"\n{len(PATHS)} shipped configs tested")
