"""The promise: the same bits on 1, 2 and 3 processes, in any order, in both dtypes, with uneven shards and
idle ranks."""

from helpers.runs import many, result_of
from helpers.tiny import write_config

CASES = {
    # 37 windows, 19 batches: no process count divides either.
    "fp32": ["dtype=fp32", "protocol.max_seq_len=64", "max_windows=37", "batch_size=2"],
    "bf16": ["dtype=bf16", "protocol.max_seq_len=64", "max_windows=37", "batch_size=2"],
    # Two batches: with three processes one has nothing to do.
    "fewer_batches_than_processes": ["protocol.max_seq_len=64", "max_windows=3", "batch_size=2"],
    "tail": ["protocol.max_seq_len=100", "protocol.keep_tail=true", "batch_size=3"],
    "by_node": [
        *("dtype=fp32", "protocol.max_seq_len=64", "max_windows=37", "batch_size=2"),
        "aggregation.topology=hierarchical",
    ],
    "lines": ["dataset.unit=line", "protocol.max_seq_len=50", "batch_size=4"],
}
# One process has threads for two batches at once, two processes have one thread each, and three are two
# nodes, of two ranks and of one.
ENVIRONMENTS = {
    1: {"OMP_NUM_THREADS": "4"},
    2: {"OMP_NUM_THREADS": "1"},
    3: {"OMP_NUM_THREADS": "1"},
}
NODES = {3: [0, 0, 1]}
ORDERS = {"": [], "_reversed": ["reversed"]}


def fingerprint(result):
    return (
        result["nll_sum_hex"],
        result["num_tokens"],
        result["num_windows"],
        result["coverage"]["sha256"],
        result["perplexity_stderr"],
        result["top1_accuracy"],
        result["num_bytes"],
        result["num_words"],
    )


def test_same_bits_for_every_process_count_and_order(tiny, tmp_path, private_home):
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text)
    results = {}
    for num_processes in (1, 2, 3):
        argvs = [
            [
                *first,
                "--config",
                str(config),
                *overrides,
                f"output_dir={tmp_path / f'{num_processes}_{name}{order}'}",
            ]
            for name, overrides in CASES.items()
            for order, first in ORDERS.items()
        ]
        finished = many(num_processes, argvs, tmp_path, ENVIRONMENTS[num_processes], NODES.get(num_processes))
        assert finished.code == 0, finished.output
        for name in CASES:
            for order in ORDERS:
                result = result_of(tmp_path / f"{num_processes}_{name}{order}")
                assert result["parallel"]["world_size"] == num_processes
                results[name, num_processes, order] = fingerprint(result)
    for name in CASES:
        found = {key[1:]: value for key, value in results.items() if key[0] == name}
        assert len(set(found.values())) == 1, (name, found)
    assert results["by_node", 3, ""] == results["fp32", 3, ""]
    assert results["fp32", 1, ""][0] != results["bf16", 1, ""][0]
