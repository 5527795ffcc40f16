"""Bad and hostile input, row by row: one clear error, exit code 2, nothing written, nothing run.

Rows go through the recipe in this process; a handful at the end are real `tune run`s.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import distributed_ppl_eval
from helpers import hostile
from helpers.runs import PPL_EVAL, TUNE, run
from helpers.tiny import write_config
from ppl_eval.config import own_code
from ppl_eval.distributed.rendezvous import EXIT_BAD_INPUT, Stop

SFT = "dataset=ppl_eval.data.sft"
ALPACA = "{_component_: torchtune.datasets.alpaca_dataset, source: json"
NAME = "_component_"


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of the tiny model's folder, to be damaged."""
    return shutil.copytree(tiny.folder, tmp_path / "model")


@pytest.fixture
def refuse(tiny, tmp_path, folder, private_home, capsys, monkeypatch):
    """Run in a working directory full of hostile modules; returns what stderr says."""
    mark = tmp_path / "it_ran"
    here = tmp_path / "here"
    here.mkdir()
    hostile.write_modules(here, mark)
    config = write_config(tmp_path / "config.yaml", folder, tiny.text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    monkeypatch.setenv("MARK", str(mark))
    monkeypatch.setattr(own_code, "_guarded", True)  # As in a process of the recipe's own.

    whole = config.read_text()

    def refuse(*overrides: str, behind: str = "", **keys: Any) -> str:
        config.write_text(f"{whole}{behind}\n")
        if keys:
            write_config(config, folder, tiny.text, **keys)
        before, alive = hostile.tree(tmp_path), hostile.children()
        with pytest.raises(Stop) as stop:
            distributed_ppl_eval.run(
                ["--config", str(config), *(o.replace("HERE", str(tmp_path)) for o in overrides)]
            )
        assert stop.value.code == EXIT_BAD_INPUT
        said = capsys.readouterr().err
        assert said.count("error:") == 1, said
        assert "Traceback" not in said
        assert not mark.exists(), "it ran"
        assert hostile.children() == alive
        new = list(hostile.unlisted(before, hostile.tree(tmp_path)))
        assert not [name for name in new if not name.startswith("home/")], new
        return said.replace("\n", " ")

    yield refuse
    own_code.allow(())


# What a person mistypes. Each says the key, what was found, and what is allowed or what to do.
BAD = [
    ("batch_sise=2", "unknown key 'batch_sise'", "did you mean 'batch_size'"),
    ("batch_size=0", "batch_size is 0", "at least 1"),
    ("batch_size=-4", "batch_size is -4", "at least 1"),
    ("batch_size=1.5", "batch_size is 1.5", "a whole number"),
    ("batch_size=true", "batch_size is True", "a whole number"),
    ("batch_size=[1]", "batch_size is", "a whole number"),
    ("batch_size=null", "batch_size is None", "a whole number"),
    ("batch_size=99999999999999999999", "batch_size is 99999999999999999999", "at most"),
    ("batch_size=010", "YAML reads 010 as 8", "write 8 if that is meant"),
    ("batch_size=0o10", "batch_size is '0o10'", "a whole number"),
    ("max_windows=0", "max_windows is 0", "at least 1"),
    ("max_windows=x", "max_windows is 'x'", "a whole number"),
    ("seed=-1", "seed is -1", "at least 0"),
    ("seed=4294967296", "seed is 4294967296", "at most 4294967295"),
    ("seed_check=warm", "seed_check is 'warm'", "did you mean 'warn'"),
    ("config_check=no", "config_check is", "error, warn, off"),
    ("dtype=float32", "dtype is 'float32'", "bf16, fp16, fp32, fp64"),
    ("softmax=null", "softmax is None", "exact, torch"),
    ("device=cpuu", "device is 'cpuu'", "cpu"),
    ("device=7", "device is 7", "text"),
    ("backend=carrier-pigeon", "backend is 'carrier-pigeon'", "gloo or nccl"),
    ("timeout_seconds=0", "timeout_seconds is 0", "at least 1"),
    ("timeout_seconds=.inf", "timeout_seconds is inf", "finite"),
    ("max_logits_mib=.nan", "max_logits_mib is nan", "finite"),
    ("max_logits_mib=0.001", "max_logits_mib", "raise max_logits_mib"),
    ("aggregation=exact", "aggregation is 'exact'", "a section"),
    ("aggregation.precision=double", "aggregation.precision is 'double'", "exact, float64, float32, auto"),
    ("aggregation.topologie=flat", "unknown key 'aggregation.topologie'", "aggregation.topology"),
    ("position_buckets=0", "position_buckets is 0", "at least 1"),
    ("per_window=yes please", "per_window is 'yes please'", "true or false"),
    ("log_level=loud", "log_level is 'loud'", "DEBUG, INFO, WARNING, ERROR"),
    ("data_parallel_shard_dim=-2", "data_parallel_shard_dim is -2", "at least -1"),
    ("tensor_parallel_dim=0", "tensor_parallel_dim is 0", "at least 1"),
    ("context_parallel_dim=3", "context_parallel_dim", "3"),
    ("baseline=nowhere.json", "baseline: cannot read nowhere.json", "No such file"),
    ("baseline=HERE/model/config.json", "is not a result of this tool", "nll_sum_hex"),
    ("output_dir=HERE/config.yaml/out", "output_dir", "cannot be written"),
    ("~output_dir", "the config has no output_dir", "text"),
    ("~model", "the config has no model", "a section"),
    ("~nothing", "no key 'nothing' to remove", "~nothing"),
    ("batch_size", "cannot read the argument 'batch_size'", "key=value"),
    ("--batch_size=2", "cannot read the argument '--batch_size=2'", "key=value"),
    ("batch_size=???", "batch_size is ???", "give it one"),
    ("output_dir=${nowhere}/x", "refers to something that is not there", "nowhere"),
    ("dataset.paths=[nowhere.txt]", "no file is named 'nowhere.txt'", "dataset.paths"),
    ("dataset.paths=[]", "dataset.paths is empty", "at least one file"),
    ("dataset.path=[a]", "unknown key 'dataset.path'", "did you mean 'dataset.paths'"),
    ("dataset.unit=word", "dataset.unit is 'word'", "file"),
    ("~dataset.paths", "the config has no dataset.paths", "text_files needs"),
    ("dataset=ppl_eval.data.text_fils", "has no 'text_fils'", "did you mean 'ppl_eval.data.text_files'"),
    ("dataset=[a]", "dataset._component_ is ['a']", "dotted path"),
    ("dataset=text_files", "dataset._component_ is 'text_files'", "dotted path"),
    ("dataset=ppl_evil.data.text_files", "there is no module 'ppl_evil'", "ppl_eval.data"),
    ("protocol=ppl_eval.protocols.disjoined", "has no 'disjoined'", "ppl_eval.protocols.disjoint'"),
    ("protocol.max_seq_len=0", "max_seq_len is 0", "protocol.max_seq_len"),
    ("protocol.max_seq_len=300", "protocol.max_seq_len is 300", "built for 256 tokens"),
    ("protocol.stride=4", "unknown key 'protocol.stride'", "disjoint takes"),
    ("protocol.bos=perhaps", "bos is 'perhaps'", "tokenizer"),
    ("model.num_head=4", "unknown key 'model.num_head'", "did you mean 'model.num_heads'"),
    ("~model.num_heads", "the config has no model.num_heads", "llama3_2 needs"),
    ("model.num_heads=3", "model", "num_kv_heads"),
    ("model.num_layers=3", "num_layers", "config_check=warn"),
    ("model=torchtune.models.llama3_2.llama3_3", "has no 'llama3_3'", "did you mean"),
    ("model=torchtune.models.lama3_2.llama3_2", "there is no module 'torchtune.models.lama3_2'", "did you"),
    (
        "checkpointer.checkpoint_dir=HERE/nowhere",
        "checkpoint_dir HERE/nowhere is not a folder",
        "checkpointer",
    ),
    ("checkpointer.checkpoint_dir=HERE/here", "1 of 1 checkpoint files are missing", "model.safetensors"),
    ("checkpointer.checkpoint_files=[m.bin]", "missing", "weight files there: model.safetensors"),
    ("checkpointer.model_type=LLAMA9", "LLAMA9", "model_type"),
    ("checkpointer.dir=x", "checkpointer has unknown keys ['dir']", "checkpoint_dir"),
    ("checkpointer=torchtune.training.HFCheckpointer", "it can be one of", "FullModelHFCheckpointer"),
    ("checkpointer.allow_unsafe_pickle=maybe", "allow_unsafe_pickle is 'maybe'", "true or false"),
    ("tokenizer.tokenizer_json_path=nowhere.json", "nowhere.json", "tokenizer"),
    ("quantizer=torchao.quantization.Int3WeightOnlyConfig", "quantizer._component_ is", "it can be"),
    ("metric_logger=torchtune.training.metric_logging.DiscLogger", "has no 'DiscLogger'", "DiskLogger"),
    ("allow_components=my-package", "allow_components has 'my-package'", "allow_components=my_package"),
    ("allow_components=os", "allow_components has 'os'", "a package of your own"),
    ("allow_components=torchtune", "allow_components has 'torchtune'", "a package of your own"),
]

# What somebody wrote so that it runs.
RUN = "os.system"
HOSTILE = {
    **{
        f"{section}={path}": ((f"{section}={path}",), f"{section}._component_ is '{path}'")
        for section in ("model", "tokenizer", "dataset", "checkpointer", "quantizer", "protocol")
        for path in ("os.system", "torch.os.system", "my_module.run")
    },
    **{
        path: ((f"{section}={path}",), f"'{path}'")
        for section, path in [
            ("metric_logger", "subprocess.run"),
            ("metric_logger", "wandb.run"),
            ("metric_logger", "torchtune.training.metric_logging.os.system"),
            ("metric_logger", "torchtune.training.metric_logging.get_logger"),
            ("tokenizer", "torchtune.config.instantiate"),
            ("tokenizer", "torchtune.models.llama3._tokenizer.parse_hf_tokenizer_json"),
            ("tokenizer", "torchtune.models.clip.clip_tokenizer"),
            ("model", "torchtune._cli.run.Run"),
            ("model", "torchtune.utils.get_logger"),
            ("model", "torchtune.models.convert_weights.hf_to_tune"),
            ("model", "ppl_eval.models.families.supported"),
            ("model", "ppl_eval.commands.demo_model.fetch"),
            ("dataset", "ppl_eval.commands.demo_model.fetch"),
            ("dataset", "ppl_eval.data.text_sources.Path"),
            ("dataset", "ppl_eval.data.input_files.glob.os.system"),
            ("dataset", "ppl_eval.data.input_files.expand_paths"),
            ("dataset", "ppl_eval.tokenization.workers.subprocess.run"),
            ("dataset", "torchtune.datasets.alpaca_dataset"),
            ("protocol", "ppl_eval.protocols.plan.make_plan"),
            ("protocol", "ppl_eval.tokenization.workers._serve"),
            ("quantizer", "torchao.utils.subprocess.run"),
            ("model", "transformers.pipeline"),
            ("model", "builtins.eval"),
            ("model", "torchtune.models..os"),
            ("model", "torchtune.models.llama3_2.llama3_2.__globals__"),
        ]
    },
    "plan of two ranks": (
        ("tensor_parallel_plan=torchtune.training.os.system",),
        "tensor_parallel_plan._component_",
    ),
    "in a domain": (
        ("dataset={_component_: ppl_eval.data.domains, sources: {a: {_component_: os.system, command: x}}}",),
        "dataset.sources.a._component_ is 'os.system'",
    ),
    "in a domain of a domain": (
        (
            "dataset={_component_: ppl_eval.data.domains, sources: {a: {_component_: ppl_eval.data.domains,"
            " sources: {b: {_component_: my_module.run}}}}}",
        ),
        "dataset.sources.a.sources.b._component_ is 'my_module.run'",
    ),
    "in sft": (
        ("dataset={_component_: ppl_eval.data.sft, dataset: {_component_: my_module.run}}",),
        "dataset.dataset._component_ is 'my_module.run'",
    ),
    "loader in sft": (
        (
            "~dataset.paths",
            "dataset={_component_: ppl_eval.data.sft, dataset: {_component_:"
            " torchtune.datasets._sft.load_dataset}}",
        ),
        "which is defined in datasets.load; it must be a dataset of torchtune",
    ),
    "argument in sft": (
        (
            "dataset={_component_: ppl_eval.data.sft, dataset: {_component_: torchtune.datasets.SFTDataset,"
            " message_transform: {_component_: os.system}}}",
        ),
        "dataset.dataset.message_transform._component_ is 'os.system'",
    ),
    "in a list": (
        (
            "dataset={_component_: ppl_eval.data.sft, dataset: {_component_: torchtune.datasets.SFTDataset,"
            " transforms: [{_component_: my_module.run}]}}",
        ),
        "dataset.dataset.transforms.0._component_ is 'my_module.run'",
    ),
    "template by its path": (
        ("tokenizer.prompt_template=my_module.run",),
        "tokenizer.prompt_template is 'my_module.run'",
    ),
    "code that comes with data": (
        (
            "dataset={_component_: ppl_eval.data.sft, dataset: {_component_:"
            " torchtune.datasets.alpaca_dataset, source: evil/data, trust_remote_code: true}}",
        ),
        "code that comes with data is never run",
    ),
    "data that are pickles": (
        (
            "dataset={_component_: ppl_eval.data.sft, dataset: {_component_:"
            " torchtune.datasets.alpaca_dataset, source: pandas, data_files: x.pkl}}",
        ),
        "whose files are pickles",
    ),
    "calibration": (
        (
            "quantizer={_component_: ppl_eval.quantization.awq, calibration: {num_windows: 1, dataset:"
            " {_component_: my_module.run}}}",
        ),
        "quantizer.calibration.dataset._component_ is 'my_module.run'",
    ),
    "out of the environment": (
        ("dataset._component_=${oc.env:EVIL,os.system}",),
        "dataset._component_ is 'os.system'",
    ),
    "decoded": (
        ("dataset=${oc.decode:'{_component_: os.system, command: x}'}",),
        "dataset",
    ),
    "a resolver that runs": (("output_dir=${my_module:run}",), "refers to something that is not there"),
    "own code that is not where it says": (
        ("allow_components=my_package", "dataset=my_module.run"),
        "allow_components=my_module",
    ),
    "slices out of the folder": (
        ("checkpointer.checkpoint_files=[../other/model.safetensors]",),
        "checkpointer.checkpoint_files names the file '../other/model.safetensors'",
    ),
    "absolute slices": (
        ("checkpointer.checkpoint_files=[/etc/passwd]",),
        "checkpointer.checkpoint_files names the file '/etc/passwd'",
    ),
}


class Runs:
    """Its pickle makes the mark."""

    def __reduce__(self) -> Any:
        return os.system, ("touch $MARK",)


def _index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _linked(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / f"outside-{name}")
    (folder / name).symlink_to(folder.parent / f"outside-{name}")


def _tensors(folder: Path, entries: dict[str, Any]) -> None:
    (folder / "model.safetensors").write_bytes(hostile.safetensors_bytes(entries))


def _entry(begin: Any, end: Any, shape: Any = (4,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _int8(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pickled(folder: Path) -> None:
    torch.save({"a": Runs()}, folder / "pytorch_model.bin")


# Files of a checkpoint: what happens to the folder, overrides, and what is said.
FOUND = "~checkpointer.checkpoint_files"
FILES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "index out of the folder": (
        lambda at: _index(at, {"a": "../outside.safetensors"}),
        (FOUND,),
        "names the file '../outside.safetensors', which is not inside the checkpoint's folder",
    ),
    "index out and in again": (
        lambda at: _index(at, {"a": "../model/other.safetensors"}),
        (FOUND,),
        "names must be relative, without '..'",
    ),
    "absolute index": (lambda at: _index(at, {"a": "/etc/passwd"}), (FOUND,), "names the file '/etc/passwd'"),
    "index of numbers": (lambda at: _index(at, {"a": 7}), (FOUND,), "has files that are no text"),
    "index of nothing": (lambda at: _index(at, []), (FOUND,), "has no weight_map"),
    "index that is nested": (
        lambda at: (_index(at, {}), (at / "model.safetensors.index.json").write_text(hostile.nested(99999))),
        (FOUND,),
        "nested too deeply",
    ),
    "weights behind a link": (
        lambda at: _linked(at, "model.safetensors"),
        (),
        "outside-model.safetensors, outside the checkpoint's folder",
    ),
    "found weights behind a link": (
        lambda at: _linked(at, "model.safetensors"),
        (FOUND,),
        "outside-model.safetensors, outside the checkpoint's folder",
    ),
    "config behind a link": (
        lambda at: _linked(at, "config.json"),
        (),
        "outside-config.json, outside the checkpoint's folder",
    ),
    "config that is a list": (
        lambda at: (at / "config.json").write_text("[1]"),
        (),
        "config.json cannot be read as JSON: it holds a list, not an object",
    ),
    "config that is nested": (
        lambda at: (at / "config.json").write_text(hostile.nested(99999)),
        (),
        "config.json cannot be read as JSON: it is nested too deeply",
    ),
    "config with a key twice": (
        lambda at: (at / "config.json").write_text('{"rope_theta": 1, "rope_theta": 2}'),
        (),
        "it has the key 'rope_theta' twice",
    ),
    "config with a number of 5000 digits": (
        lambda at: (at / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}"),
        (),
        "config.json cannot be read as JSON",
    ),
    "tokenizer that is nested": (
        lambda at: (at / "tokenizer.json").write_text(hostile.nested(99999)),
        (),
        "tokenizer: torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer cannot be built",
    ),
    "tokenizer that is cut off": (
        lambda at: (at / "tokenizer.json").write_text((at / "tokenizer.json").read_text()[:300]),
        (),
        "tokenizer.json",
    ),
    "tokenizer config that is nested": (
        lambda at: (at / "tokenizer_config.json").write_text(hostile.nested(99999)),
        (),
        "tokenizer_config.json",
    ),
    "two tensors in the same bytes": (
        lambda at: _tensors(at, {"a": _entry(0, 16), "b": _entry(0, 16)}),
        (),
        "tensor b begins at byte 0 of the data and shares bytes with a",
    ),
    "tensors that overlap": (
        lambda at: _tensors(at, {"a": _entry(0, 16), "b": _entry(8, 24)}),
        (),
        "tensor b begins at byte 8 of the data and shares bytes with a, which ends at 16",
    ),
    "bytes of no tensor": (
        lambda at: _tensors(at, {"a": _entry(0, 16), "b": _entry(48, 64)}),
        (),
        "tensor b begins at byte 48 of the data and leaves a hole behind a, which ends at 16",
    ),
    "bytes before the first tensor": (
        lambda at: _tensors(at, {"a": _entry(48, 64)}),
        (),
        "hole behind the header",
    ),
    "bytes after the last tensor": (
        lambda at: _tensors(at, {"a": _entry(0, 16)}),
        (),
        "longer than its header",
    ),
    "offsets backwards": (lambda at: _tensors(at, {"a": _entry(0, -64)}), (), "whole numbers from 0"),
    "offsets the wrong way round": (lambda at: _tensors(at, {"a": _entry(64, 0)}), (), "is corrupt"),
    "half an element": (lambda at: _tensors(at, {"a": _entry(0, 64, [16.5])}), (), "whole numbers from 0"),
    "a shape of 2^64 elements": (
        lambda at: _tensors(at, {"a": _entry(0, 0, [2**32, 2**32]), "b": _entry(0, 64, [16])}),
        (),
        "needs 73786976294838206464 bytes",
    ),
    "a dtype that is a list": (lambda at: _tensors(at, {"a": _entry(0, 64, [16], ["F32"])}), (), "has dtype"),
    "header that is nested": (
        lambda at: (at / "model.safetensors").write_bytes(
            (len(hostile.nested(99999))).to_bytes(8, "little") + hostile.nested(99999).encode()
        ),
        (),
        "its safetensors header cannot be read (RecursionError",
    ),
    "whole numbers for weights": (_int8, (), "stores whole numbers (int8) where the model has weights"),
    "weights that run": (
        _pickled,
        ("checkpointer.checkpoint_files=[pytorch_model.bin]",),
        "Loading it would run code that the file chooses",
    ),
}

# Configs: what is put behind the good one, and what is said.
BEHIND = {
    "own code allowed by the file": (
        "allow_components: my_module",
        "allow_components is in the config file, but it counts only on the command line",
    ),
    "own code allowed by a list": (
        "allow_components: [my_module, b]",
        "start the run with allow_components=my_module,b",
    ),
    "a second document": ("---\nbatch_size: 2", "is not valid YAML"),
    "a key twice": ("batch_size: 2\nbatch_size: 3", "is not valid YAML"),
    "Python's tags": ("seed: !!python/object/apply:os.system ['touch $MARK']", "is not valid YAML"),
    "Python's modules": ("seed: !!python/module:my_module", "is not valid YAML"),
    "aliases of aliases": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "once its aliases are put in; the most that is read is 100000",
    ),
    "an alias of itself": ("a: &a [*a]", "is not valid YAML"),
    "nested lists": ("a: " + "[" * 5000 + "]" * 5000, "is not valid YAML"),
    "a control character": ("a: \0", "is not valid YAML"),
}


def test_there_are_as_many_rows_as_promised():
    assert len(BAD) >= 60
    assert len(HOSTILE) >= 20


@pytest.mark.parametrize(("override", "found", "remedy"), BAD, ids=[row[0] for row in BAD])
def test_bad(refuse, tmp_path, override, found, remedy):
    said = refuse(override)
    assert found.replace("HERE", str(tmp_path)) in said
    assert remedy in said


@pytest.mark.parametrize(("overrides", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile(refuse, overrides, words):
    assert words in refuse(*overrides)


@pytest.mark.parametrize(("damage", "overrides", "words"), FILES.values(), ids=FILES)
def test_files(refuse, folder, damage, overrides, words):
    damage(folder)
    assert words in refuse(*overrides)


@pytest.mark.parametrize(("behind", "words"), BEHIND.values(), ids=BEHIND)
def test_config_files(refuse, behind, words):
    assert words in refuse(behind=behind)


@pytest.mark.parametrize("value", ["true", "'true'", "1", "${oc.decode:'true'}", "${aside}"])
def test_a_file_cannot_allow_unsafe_pickles(refuse, folder, tiny, tmp_path, value):
    _pickled(folder)
    whole = {
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["pytorch_model.bin"],
        "model_type": "LLAMA3_2",
    }
    whole[NAME] = "torchtune.training.FullModelHFCheckpointer"
    section = whole | {"allow_unsafe_pickle": OmegaConf.create(f"x: {value}")._get_node("x")._value()}
    said = refuse(checkpointer="${whole}", whole=section, aside=True)
    assert "checkpointer.allow_unsafe_pickle is in the config file, but it counts only on the command" in said


def test_the_command_line_can_allow_them(refuse, folder, tmp_path):
    """And the mark shows that it ran, as all other rows would if something did."""
    _pickled(folder)
    with pytest.raises(AssertionError, match="it ran"):
        refuse("checkpointer.checkpoint_files=[pytorch_model.bin]", "checkpointer.allow_unsafe_pickle=true")


def test_no_file_of_a_run_can_be_written_by_others(folder, tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", folder, tiny.text)
    before = os.umask(0)
    try:
        assert distributed_ppl_eval.run(["--config", str(config), "per_window=true"]) == 0
    finally:
        os.umask(before)
    made = [path for top in ("out", "home") for path in [tmp_path / top, *(tmp_path / top).rglob("*")]]
    assert {"result.json", "windows.parquet", ".lock", "tokens.bin"} <= {path.name for path in made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_a_cache_that_others_can_change_is_refused(refuse, private_home):
    private_home.mkdir()
    private_home.chmod(0o777)
    assert f"everybody can write to the cache folder {private_home}" in refuse()
    private_home.chmod(0o755)
    if os.getuid() == 0:
        os.chown(private_home, 1234, -1)
        assert f"the cache folder {private_home} belongs to user 1234" in refuse()


def test_own_code_in_the_working_directory_needs_the_command_line(refuse, tmp_path):
    with pytest.raises(AssertionError, match="it ran"):
        refuse("allow_components=my_module", "dataset=my_module.nothing")


def test_what_own_code_may_not_reach(refuse, tmp_path):
    (tmp_path / "here" / "quiet.py").write_text("import os\nfrom os import system\nPath = os.PathLike\n")
    for name, words in {
        "quiet.os.system": "there is no module 'quiet.os'",
        "quiet.system": "a builtin_function_or_method",
        "quiet.os": "a module",
        "quiet.Path": "which is defined in os",
        "my_module.run": "allow_components=my_module",
    }.items():
        assert words in refuse("allow_components=quiet", f"dataset={name}", "~dataset.paths")


def test_the_working_directory_is_searched_last_and_only_for_own_code(refuse, tmp_path):
    here = str(tmp_path / "here")
    assert sys.path[-1] == here
    refuse("batch_size=0")
    assert here not in sys.path
    refuse("allow_components=quiet", "batch_size=0")
    assert sys.path[-1] == here


def test_torchtune_imports_no_other_argument_by_its_path():
    """What kinds.py checks by the name of the argument is all there is."""
    users = {}
    for path in Path(torchtune.__file__).parent.rglob("*.py"):
        imports = re.compile(r"_get_component_from_path\(|import_module\(")
        lines = list(filter(imports.search, path.read_text().splitlines()))
        if lines and path.parent.name != "config":
            users[path.name] = [line.strip() for line in lines]
    assert users == {"_prompt_templates.py": ["return _get_component_from_path(prompt_template)()"]}


NAME_AND_CONFIG = ["distributed_ppl_eval", "--config", "../good.yaml"]
ONE, TWO = [TUNE, "run", *NAME_AND_CONFIG], [TUNE, "run", "--nproc_per_node", "2", *NAME_AND_CONFIG]
LAUNCH = [PPL_EVAL, "launch", "--nproc_per_node", "2", "--", *NAME_AND_CONFIG[1:]]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        pytest.param([*ONE, "metric_logger=wandb.run"], 2, "_component_ is 'wandb.run'", id="one, hostile"),
        pytest.param([*TWO, "model=os.system"], 1, "_component_ is 'os.system'", id="two, hostile"),
        pytest.param(LAUNCH, 0, "tokens scored", id="launch"),
        pytest.param(ONE, 0, "tokens scored", id="one", marks=pytest.mark.slow),
        pytest.param(TWO, 0, "tokens scored", id="two", marks=pytest.mark.slow),
    ],
)
def test_real_runs(folder, tiny, tmp_path, private_home, command, code, words):
    """In a working directory whose modules would take the place of Python's, torch's and optional ones."""
    mark, here = tmp_path / "it_ran", tmp_path / "here"
    here.mkdir()
    hostile.write_modules(here, mark, ("json", "statistics", "torch", "torchtune", "ppl_eval"))
    if command is LAUNCH:
        # `python -m` imports these before the recipe's first line; only the launcher can prevent that.
        hostile.write_modules(here, mark, ("contextlib", "pathlib"))
    write_config(tmp_path / "good.yaml", folder, tiny.text)
    done = run(*command, env={"MARK": str(mark), "PYTHONPATH": ""}, cwd=here)
    assert (done.code, mark.exists()) == (code, False), done.output
    assert words in done.output
    # torchrun repeats the cause at the end of its output.
    assert len(set(re.findall(r"error: .*", done.output))) == (code != 0), done.output
