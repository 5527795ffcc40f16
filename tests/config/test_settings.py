"""The config: overrides, names, and errors that name the key and the nearest real one."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from helpers.tiny import write_config
from ppl_eval.config import components, settings, yaml_files
from ppl_eval.config.settings import read_settings


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return write_config(folder / "config.yaml", folder, folder / "text.txt")


def read(config, *overrides):
    return read_settings(["--config", str(config), *overrides])


def test_defaults_and_overrides(config):
    found = read(
        config, "batch_size=5", "protocol.max_seq_len=512", "dataset.paths=[a.txt,b=c.txt]", "quantizer=None"
    )
    assert (found.batch_size, found.protocol.max_seq_len, found.seed) == (5, 512, 42)
    assert list(found.dataset.paths) == ["a.txt", "b=c.txt"]
    assert found.quantizer is None
    assert found.aggregation == settings.Aggregation("exact", "flat")


def test_naming_a_section_sets_its_component(config):
    found = read(config, "dataset=ppl_eval.data.python_docs", "~dataset.paths")
    assert OmegaConf.to_container(found.dataset) == {"_component_": "ppl_eval.data.python_docs"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batchsize=2", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        (
            "protocol.max_seq_length=2",
            "unknown key 'protocol.max_seq_length'.*did you mean 'protocol.max_seq_len'?",
        ),
        (
            "aggregation.precison=exact",
            "unknown key 'aggregation.precison'; did you mean 'aggregation.precision'?",
        ),
        ("batch_size=two", "batch_size is 'two'; it must be a whole number"),
        ("batch_size=true", "batch_size is True; it must be a whole number"),
        ("batch_size=0", "batch_size is 0; it must be at least 1"),
        ("max_windows=0", "max_windows is 0; it must be at least 1"),
        ("dtype=bf61", "dtype is 'bf61'; it must be one of .*did you mean 'bf16'?"),
        ("seed_check=warm", "seed_check is 'warm'.*did you mean 'warn'?"),
        ("model=12", "model is 12|model._component_"),
        ("protocol=ppl_eval.protocols.disjiont", "did you mean 'ppl_eval.protocols.disjoint'?"),
        ("protocol=pl_eval.protocols.disjoint", "there is no module 'pl_eval'"),
        (
            "~protocol.max_seq_len",
            "the config has no protocol.max_seq_len, which ppl_eval.protocols.disjoint needs",
        ),
        ("~output_dir", "the config has no output_dir; it must be text"),
        ("~nothing", "no key 'nothing' to remove"),
        ("batch_size", "overrides have the form key=value"),
        ("--batch_size=2", "overrides have the form key=value"),
        ("batch_size=010", "YAML reads 010 as 8"),
        ("max_windows=1:30", "YAML reads 1:30 as 90"),
        ("batch_size=0x10", "YAML reads 0x10 as 16"),
        ("timeout_seconds=.nan", "timeout_seconds is nan; it must be a finite number"),
        ("max_logits_mib=.inf", "max_logits_mib is inf; it must be a finite number"),
        ("baseline_tolerance=-.inf", "baseline_tolerance is -inf; it must be a finite number"),
        ("seed=1234567890123456789012345678901", "seed is .*; it must be at most 4294967295"),
        ("seed=???", "seed is ???, which stands for a value still to be given"),
        ("output_dir=???", "output_dir is ???, which stands for a value still to be given"),
        (
            "protocol.max_seq_len=???",
            "protocol.max_seq_len is ???, which stands for a value still to be given",
        ),
        ("output_dir=${nowhere}/x", "refers to something that is not there.*nowhere"),
    ],
)
def test_errors_name_the_key_and_the_way_out(config, override, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        read(config, override)


def test_component_of_torchtune_is_checked_when_it_is_built(config):
    found = read(config, "model=torchtune.models.llama3_2.lama3_2")
    with pytest.raises(ValueError, match=r"did you mean 'torchtune.models.llama3_2.llama3_2'"):
        components.instantiate("model", found.model)
    found = read(config, "model.num_head=3")
    with pytest.raises(ValueError, match=r"unknown key 'model.num_head'.*did you mean 'model.num_heads'"):
        components.instantiate("model", found.model)


def test_helper_keys_are_welcome_where_something_refers_to_them(config):
    assert read(config, "folder=/x", "output_dir=${folder}/y").output_dir == "/x/y"
    with pytest.raises(ValueError, match="unknown key 'folder'"):
        read(config, "folder=/x")


def test_shipped_names(config):
    assert "smollm2/135M_ppl" in yaml_files.shipped_configs()
    assert yaml_files.find_config("smollm2/135M_ppl") == yaml_files.find_config("smollm2/135M_ppl.yaml")
    with pytest.raises(ValueError, match="did you mean 'smollm2/135M_ppl'"):
        yaml_files.find_config("smollm2/135M_pp")


def test_torchs_softmax_needs_whole_rows(config):
    with pytest.raises(ValueError, match="softmax is 'torch', which needs whole rows"):
        read(config, "softmax=torch", "tensor_parallel_dim=2")


def test_a_name_of_5000_characters_is_an_error_like_any_other():
    with pytest.raises(ValueError, match="no config is called 'aaa"):
        yaml_files.find_config("a" * 5000)


def test_a_number_in_another_base_is_refused_with_its_line(tmp_path):
    (tmp_path / "octal.yaml").write_text("output_dir: x\nprotocol:\n  max_seq_len: 0100\n  note: '010'\n")
    with pytest.raises(ValueError, match="line 3: YAML reads 0100 as 64"):
        read(tmp_path / "octal.yaml")


def test_broken_yaml(tmp_path):
    (tmp_path / "broken.yaml").write_text("a: [1\nb: }")
    with pytest.raises(ValueError, match="not valid YAML"):
        read(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        read(tmp_path / "list.yaml")


def test_the_option_surface_is_frozen():
    """A new or renamed key is a decision, to be written down in docs/config.md and here."""
    assert sorted(settings.KEYS) == OPTIONS.split()
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    keys = {*settings.KEYS, *(f"aggregation.{name}" for name in settings.AGGREGATION_KEYS)} - {"aggregation"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_every_key_is_read_by_something():
    sources = "".join(
        path.read_text()
        for path in Path(settings.__file__).parents[2].rglob("*.py")
        if path.name != "settings.py"
    )
    keys = set(settings.KEYS) - {"data_parallel_replicate_dim"}
    assert [key for key in sorted(keys) if f".{key}" not in sources and f'"{key}"' not in sources] == []


OPTIONS = """
aggregation backend baseline baseline_tolerance batch_size checkpointer compile config_check
context_parallel_dim cross_check data_parallel_replicate_dim data_parallel_shard_dim dataset debug_nan device
dtype fsdp_cpu_offload fsdp_reshard_after_forward log_level log_peak_memory_stats max_logits_mib max_windows
metric_logger model nan output_dir part per_document per_token per_window position_buckets protocol quantizer
reference report resume schedule seed seed_check softmax tags
tensor_parallel_dim tensor_parallel_plan timeout_seconds tokenizer
"""


def test_a_component_that_moved_is_found_under_its_old_name(config):
    found = read(config, "quantizer=ppl_eval.calibration.awq", "quantizer.calibration={}")
    assert found.quantizer._component_ == "ppl_eval.quantization.awq"
