"""The ledger: nothing that was flushed is lost, nothing torn is read."""

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.processes import Script
from helpers.runs import ranks
from helpers.tiny import write_config
from helpers.two_hosts import wait_for
from ppl_eval.metrics import window_records
from ppl_eval.results.ledger import Ledger, lock_output_dir, open_ledger, plan_key, read_ledger

RECORD = window_records.record_dtype()
SIZE = RECORD.itemsize
HELD_RUN = str(Path(__file__).parents[1] / "helpers" / "held_run.py")


def records(*window_ids):
    made = np.zeros(len(window_ids), dtype=RECORD)
    made["window_id"], made["num_tokens"] = window_ids, 10
    made["nll_sum"] = np.array(window_ids) * 0.1
    made["check"] = window_records.check_numbers(made)
    return made


def written(folder, rank, *batches):
    book = Ledger(folder, rank)
    for batch in batches:
        book.append(batch)
    return book


def test_all_ranks_are_read_in_order_of_windows(tmp_path):
    written(tmp_path, 0, records(0, 1), records(4, 5))
    written(tmp_path, 1, records(2, 3))
    found = read_ledger(tmp_path)
    assert found["window_id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["nll_sum"].tolist() == [i * 0.1 for i in range(6)]
    assert SIZE == 96


@pytest.mark.parametrize("torn", [1, SIZE - 1, SIZE + 1])
def test_torn_end_is_left_out_and_then_written_over(tmp_path, torn):
    path = written(tmp_path, 0, records(0, 1, 2)).path
    os.truncate(path, path.stat().st_size - torn)
    whole = 3 - -(-torn // SIZE)
    assert read_ledger(tmp_path)["window_id"].tolist() == list(range(whole))
    book = written(tmp_path, 0, records(7))
    assert read_ledger(tmp_path)["window_id"].tolist() == [*range(whole), 7]
    assert book.own()["window_id"].tolist() == [7], "what earlier runs left is not this run's"


def test_what_a_disk_made_up_is_left_out(tmp_path):
    path = written(tmp_path, 0, records(1, 2, 3)).path
    with open(path, "r+b") as file:
        file.seek(SIZE)
        file.write(bytes(SIZE))  # zeros, as file systems leave after a power cut
        file.seek(2 * SIZE + RECORD.fields["nll_sum"][1])
        file.write(b"\xff")  # a flipped NLL
    assert read_ledger(tmp_path)["window_id"].tolist() == [1]


def test_window_scored_by_two_runs_is_read_once(tmp_path):
    written(tmp_path, 0, records(0, 1))
    written(tmp_path, 1, records(1, 2))
    assert read_ledger(tmp_path)["window_id"].tolist() == [0, 1, 2]


def test_key_changes_with_every_fact(tmp_path):
    facts = {"dtype": "bf16", "data": {"sha256": "x"}}
    assert plan_key(facts) == plan_key(dict(reversed(facts.items())))
    assert len({plan_key(facts), plan_key({**facts, "dtype": "fp32"}), plan_key({**facts, "new": None})}) == 3


def test_folder_without_records_goes_and_one_with_records_stays(tmp_path):
    open_ledger(tmp_path, {"a": 1}, 0).close()
    assert not (tmp_path / "ledger").exists()
    book = open_ledger(tmp_path, {"a": 1}, 0)
    book.append(records(0))
    book.close()
    assert (book.folder / "plan.json").exists()
    assert len(read_ledger(book.folder)) == 1
    book.remove()
    assert not (tmp_path / "ledger").exists()


def test_folder_may_go_while_a_rank_without_records_looks_into_it(tmp_path, monkeypatch):
    ours = open_ledger(tmp_path, {"seed": 1}, rank=1)
    look = os.scandir

    def remove_and_look(path):
        monkeypatch.setattr(os, "scandir", look)
        Ledger(ours.folder, rank=0).remove()
        return look(path)

    monkeypatch.setattr(os, "scandir", remove_and_look)
    ours.close()
    assert not ours.folder.exists()


def test_a_full_disk_is_told_with_the_file(tmp_path):
    book = open_ledger(tmp_path, {"a": 1}, 0)
    book.path.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"cannot be written to .*rank-0\.bin"):
        book.append(records(0))
    book.close()


def test_one_run_at_a_time_in_an_output_dir(tmp_path):
    first = lock_output_dir(tmp_path)
    with pytest.raises(ValueError, match="another run is writing to output_dir"):
        lock_output_dir(tmp_path)
    first.release()
    lock_output_dir(tmp_path).release()


def test_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "ledger").touch()
    with pytest.raises(ValueError, match="every host needs an output_dir"):
        open_ledger(tmp_path, {}, 0)


def test_kill_in_the_middle_of_a_run_keeps_what_was_scored(tiny, tmp_path, private_home):
    """kill -9 of a whole run; the next one starts beside its records, and cleans up when it is done."""
    config = write_config(tmp_path / "config.yaml", tiny.folder, tiny.text, max_windows=9, per_window=True)
    env = {"HOLD_AFTER": "3", "HELD": str(tmp_path / "held"), "GO": str(tmp_path / "go")}
    killed = Script([HELD_RUN, "--config", str(config)], env, tmp_path / "killed.txt")
    try:
        wait_for([tmp_path / "held.0"], [killed])
    finally:
        killed.kill()
    (folder,) = (tmp_path / "out" / "ledger").iterdir()
    kept = read_ledger(folder)
    assert kept["window_id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert (kept["num_tokens"] == 63).all()

    again = ranks([["-m", "distributed_ppl_eval", "--config", str(config)]], tmp_path)
    assert again.code == 0, again.output
    assert not (tmp_path / "out" / "ledger").exists()
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out" / "windows.parquet").to_pydict()
    assert table["window_id"] == list(range(9))
    assert table["nll_sum"][:6] == kept["nll_sum"].tolist(), "the same bits in both runs"
