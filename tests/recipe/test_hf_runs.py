"""Whole runs with transformers' own code: the shipped config, the same bits on any number of ranks, and the
number of torchtune's engine."""

import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import transformers

from helpers.family_models import SIZES
from helpers.models import write_random
from helpers.runs import many, result_of, run
from helpers.tiny import VOCAB_SIZE, write_config, write_tokenizer
from ppl_eval.config.settings import read_settings

CASES = {
    "plain": ["max_windows=13", "batch_size=2"],
    "rolling": ["protocol=ppl_eval.protocols.rolling", "protocol.max_seq_len=50", "max_windows=7"],
    "tokens": ["per_token=true", "max_windows=5", "protocol.max_seq_len=48"],
    "bf16": ["dtype=bf16", "max_windows=5", "batch_size=2"],
}
SPLITS = {
    "cp": ["context_parallel_dim=2", "max_windows=13", "batch_size=2"],
    "tp": ["tensor_parallel_dim=2", "max_windows=13", "batch_size=2"],
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FSDP = ["data_parallel_shard_dim=2", "data_parallel_replicate_dim=1", "max_windows=13", "batch_size=2"]


@pytest.fixture(scope="module", params=["qwen3_tied", "olmo2", "qwen3_moe"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder)
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    configs = {
        "qwen3_tied": lambda: transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True),
        "olmo2": lambda: transformers.Olmo2Config(**sizes),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=16),
    }
    write_random(configs[request.param](), folder)
    return folder


def config_of(model, path, text):
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(model)}
    return write_config(
        path,
        model,
        text,
        model={"_component_": "ppl_eval.models.hf.causal_lm", "path": "${checkpointer.checkpoint_dir}"},
        checkpointer={**section, "model_type": "TRANSFORMERS"},
    )


def weights_hash(result):
    return result["model"]["checkpoint"]["weights_hash"]


def test_same_bits_on_1_2_and_3_ranks_and_under_fsdp(model, tiny, tmp_path, private_home):
    config = config_of(model, tmp_path / "config.yaml", tiny.text)
    results = {}
    splits = {name: SPLITS[name] for name in SPLITS if (name, model.name[:9]) != ("tp", "qwen3_moe")}
    common = CASES if model.name.startswith("qwen3_tied") else {"plain": CASES["plain"]}
    for ranks in (1, 2, 3):
        cases = {**common, **({"fsdp": FSDP, **splits} if ranks == 2 else {})}
        argvs = [
            ["--config", str(config), *overrides, f"output_dir={tmp_path / f'{ranks}_{name}'}"]
            for name, overrides in cases.items()
        ]
        finished = many(ranks, argvs, tmp_path)
        assert finished.code == 0, finished.output
        for name in cases:
            results[ranks, name] = result_of(tmp_path / f"{ranks}_{name}")
    for name in common:
        found = {
            (results[ranks, name]["nll_sum_hex"], results[ranks, name]["coverage"]["sha256"])
            for ranks in (1, 2, 3)
        }
        assert len(found) == 1, name
    assert results[2, "fsdp"]["nll_sum_hex"] == results[1, "plain"]["nll_sum_hex"]
    assert weights_hash(results[2, "fsdp"]) == weights_hash(results[1, "plain"])
    for name in splits:
        found, plain = results[2, name], results[1, "plain"]
        assert found["nll_sum"] == pytest.approx(plain["nll_sum"], rel=1e-6), name
        assert weights_hash(found) == weights_hash(plain), name
    if "tokens" not in common:
        return
    tokens = pq.read_table(tmp_path / "2_tokens" / "tokens.parquet")
    total = float(np.float64(tokens["nll"].to_numpy().astype(np.float64).sum()))
    assert total == pytest.approx(results[1, "tokens"]["nll_sum"], rel=1e-12)


def test_both_engines_give_the_same_number(tiny, tmp_path, private_home):
    ours = write_config(tmp_path / "torchtune.yaml", tiny.folder, tiny.text, max_windows=9, cross_check=3)
    theirs = config_of(tiny.folder, tmp_path / "transformers.yaml", tiny.text)
    argvs = [
        ["--config", str(ours), f"output_dir={tmp_path / 'torchtune'}"],
        ["--config", str(theirs), f"output_dir={tmp_path / 'transformers'}", "max_windows=9"],
    ]
    argvs[1].append("cross_check=100")
    finished = many(2, argvs, tmp_path)
    assert finished.code == 0, finished.output
    torchtune, other = (result_of(tmp_path / name) for name in ("torchtune", "transformers"))
    assert other["nll_sum"] == pytest.approx(torchtune["nll_sum"], rel=1e-6)
    assert other["run"]["kernels"]["attention"] == ["transformers: sdpa"]
    for result, engine, num_windows in ((torchtune, "transformers", 3), (other, "torchtune", 9)):
        found = result["cross_check"]
        assert (found["engine"], found["num_windows"]) == (engine, num_windows)
        assert found["num_tokens"] == 63 * num_windows
        assert 0 < found["largest_token_difference"] < 1e-4
        (note,) = (note for note in result["notes"] if note.startswith("cross_check"))
        assert f"{engine} scored the first {num_windows} windows ({63 * num_windows} tokens) too" in note
    # All windows of the run: the sums are those of the two runs.
    assert found["nll_sum"] == pytest.approx(other["nll_sum"], rel=1e-12)
    assert found["nll_sum_of_other"] == pytest.approx(torchtune["nll_sum"], rel=1e-12)


def test_what_cannot_be_cross_checked_is_said_before_scoring(model, tiny, tmp_path, private_home):
    config = config_of(model, tmp_path / "config.yaml", tiny.text)
    argv = ["--config", str(config), "cross_check=2", f"output_dir={tmp_path / 'out'}"]
    finished = many(2, [[*argv, *FSDP]], tmp_path)
    assert "cross_check: the model is split over ranks" in finished.output
    if model.name.startswith("qwen3_moe"):
        finished = many(1, [argv], tmp_path)
        assert "cross_check: the other engine cannot run this model: torchtune has no" in finished.output
    assert not (tmp_path / "out" / "result.json").exists()


def test_where_a_models_folder_lies_is_no_part_of_what_it_is(tiny, tmp_path, private_home):
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(tiny.folder, copy)
    argvs = []
    for name, folder in (("here", tiny.folder), ("there", copy)):
        config = config_of(folder, tmp_path / f"{name}.yaml", tiny.text)
        argvs.append(["--config", str(config), "max_windows=2", f"output_dir={tmp_path / name}"])
    finished = many(1, argvs, tmp_path)
    assert finished.code == 0, finished.output
    here, there = (result_of(tmp_path / name) for name in ("here", "there"))
    assert here["key"] == there["key"]


def test_the_shipped_config_asks_for_a_folder_and_nothing_else(tiny, tmp_path, private_home):
    with pytest.raises(ValueError, match=r"checkpointer\.checkpoint_dir"):
        read_settings(["--config", "hf/causal_lm"])
    # As a hub's cache has it: links to blobs. The process has no network, and is not to try.
    cache = tmp_path / "home" / "hub" / "models--org--tiny"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in tiny.folder.iterdir():
        blob = cache / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    (cache / "refs").mkdir()
    (cache / "refs" / "v1").write_text(COMMIT)
    text = ["dataset._component_=ppl_eval.data.text_files", f"dataset.paths=[{tiny.text}]", "max_windows=2"]
    argvs = {
        name: [
            *("--config", "hf/causal_lm", f"checkpointer.checkpoint_dir={named}", *text),
            f"output_dir={tmp_path / name}",
        ]
        for name, named in {"folder": tiny.folder, "hub": "org/tiny@v1"}.items()
    }
    assert many(2, [argvs["folder"]], tmp_path).code == 0
    # An interpreter of its own: where the cache is, the library reads when it is imported.
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    finished = run(sys.executable, "-m", "distributed_ppl_eval", *argvs["hub"], env=env)
    assert finished.code == 0, finished.output
    local, hub = (result_of(tmp_path / name) for name in ("folder", "hub"))
    assert hub["nll_sum_hex"] == local["nll_sum_hex"]
    assert hub["model"]["hub"] == {"id": "org/tiny", "commit": COMMIT}
    assert local["model"]["hub"] is None
    assert (local["dtype"], local["protocol"]["max_seq_len"]) == ("fp32", 256)
    for note in (
        "dtype: fp32, as config.json has it",
        "protocol.max_seq_len: 256, of the 256 tokens that config.json states",
        f"checkpointer.checkpoint_dir: org/tiny@v1 is commit {COMMIT} of org/tiny",
    ):
        assert note in hub["notes"]
        assert f"note: {note}" in finished.output
