"""The recipe as a person runs it: real `tune run` and `torchrun` processes, and the result file they
leave."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from helpers.readme import two_node_lines
from helpers.runs import TORCHRUN, TUNE, ranks, result_of, run
from helpers.tiny import write_config

# DESIGN of the result file; docs/result.md says what each is.
PROMISED = {
    *(
        "schema",
        "perplexity",
        "ce_loss",
        "nll_sum",
        "nll_sum_hex",
        "num_tokens",
        "num_windows",
        "num_documents",
    ),
    *("num_bytes", "num_words", "bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity_stderr"),
    *(
        "coverage",
        "protocol",
        "model",
        "quantizer",
        "dataset",
        "parallel",
        "seed",
        "timing",
        "versions",
        "notes",
    ),
}


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    return write_config(folder / "config.yaml", tiny.folder, tiny.text, max_windows=7)


@pytest.fixture(scope="module")
def home(config):
    """An empty cache folder that the runs of this module share, as a variable for them."""
    return {"PPL_EVAL_HOME": str(config.parent / "home")}


@pytest.fixture(scope="module")
def one_process(config, home):
    folder = config.parent
    logger = [
        "metric_logger=torchtune.training.metric_logging.DiskLogger",
        f"metric_logger.log_dir={folder / 'logs'}",
    ]
    launch = [TUNE, "run", "distributed_ppl_eval", "--config", str(config)]
    finished = run(*launch, "log_peak_memory_stats=true", *logger, env=home)
    assert finished.code == 0, finished.output
    return finished, result_of(folder / "out")


def test_one_process(one_process, config):
    finished, result = one_process
    assert set(result) >= PROMISED
    assert float.fromhex(result["nll_sum_hex"]) == result["nll_sum"]
    assert result["num_tokens"] == result["coverage"]["expected_tokens"] == 7 * 63
    assert result["quantizer"] is None
    assert "peak memory" in finished.output
    assert f"{result['perplexity']:.6g}" in finished.output
    (log,) = (config.parent / "logs").glob("*.txt")
    assert "perplexity" in log.read_text()


def test_plain_torchrun_and_two_nodes_agree_with_one_process(one_process, config, home, tmp_path):
    """Two agents on this machine, started by the README's own lines for two nodes."""
    _, alone = one_process
    argv = ["--config", str(config), f"output_dir={tmp_path / 'torchrun'}"]
    finished = run(
        TORCHRUN, "--standalone", "--nproc_per_node", "2", "-m", "distributed_ppl_eval", *argv, env=home
    )
    assert finished.code == 0, finished.output
    assert result_of(tmp_path / "torchrun")["nll_sum_hex"] == alone["nll_sum_hex"]

    agents = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        exports, command = two_node_lines()
        env = {
            **os.environ,
            **home,
            **exports,
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PATH": f"{Path(TUNE).parent}:{os.environ['PATH']}",
        }
        command = command.replace("--nproc_per_node 8", "--nproc_per_node 1")
        command = re.sub(r"--config \S+", f"--config {config} output_dir={tmp_path / 'two'}", command)
        agents.append(
            subprocess.Popen(
                command,
                shell=True,
                env=env,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    two = result_of(tmp_path / "two")
    assert two["parallel"]["world_size"] == 2
    assert two["parallel"]["num_nodes"] == 2
    assert two["nll_sum_hex"] == alone["nll_sum_hex"]
    assert two["coverage"] == alone["coverage"]
    # One table, from one rank.
    assert sum(output.count("tokens scored") for output in outputs) == 1


def test_shipped_config_by_name_from_any_directory(smollm2, tmp_path):
    launch = [TUNE, "run", "--nproc_per_node", "2", "distributed_ppl_eval", "--config", "smollm2/135M_ppl"]
    finished = run(*launch, "max_windows=2", "batch_size=1", "protocol.max_seq_len=64", cwd=tmp_path)
    assert finished.code == 0, finished.output
    result = result_of(tmp_path / "runs" / "smollm2-135m-ppl")
    assert result["num_tokens"] == 2 * 63


def test_baseline_gate(one_process, config, home, tmp_path):
    """The exit code and the words of a match, a mismatch, and an incomparable baseline."""
    baseline = config.parent / "out" / "result.json"
    argv = ["--config", str(config), f"output_dir={tmp_path / 'again'}"]
    (tmp_path / "off.json").write_text(
        json.dumps(
            {**json.loads(baseline.read_text()), "nll_sum_hex": "0x1p0", "ce_loss": 3.0, "dtype": "bf16"}
        )
    )
    finished = run(
        *(TUNE, "run", "distributed_ppl_eval", *argv),
        f"baseline={tmp_path / 'off.json'}",
        env=home,
    )
    assert finished.code == 3, finished.output
    assert "dtype: fp32 here, bf16 in the baseline" in finished.output
    assert (tmp_path / "again" / "result.json").is_file(), "a mismatch does not throw the result away"

    # What `tune run` starts, without the wait for it.
    job = ["-m", "distributed_ppl_eval", *argv, f"baseline={baseline}"]
    finished = ranks([job], tmp_path, [home])
    assert finished.code == 0, finished.output
    assert "the same bits" in finished.output
    finished = ranks([[*job, "protocol.max_seq_len=32"]], tmp_path, [home])
    assert finished.code == 4, finished.output
    assert "protocol.max_seq_len: 32 here, 64 in the baseline" in finished.output
    assert "model loaded" not in finished.output, "it was known before"
