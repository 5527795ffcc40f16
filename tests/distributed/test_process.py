"""What a launcher started, against what a run consists of."""

import pytest

from ppl_eval.distributed.process import launch_notes


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"SLURM_NNODES": "2"}, "2 nodes (SLURM_NNODES), but this run has 1"),
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4"}, "4 nodes (SLURM_JOB_NUM_NODES)"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "3 processes (SLURM_STEP_NUM_TASKS)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "2 processes (OMPI_COMM_WORLD_SIZE), but this run has 1"),
        ({"PMI_SIZE": "8"}, "8 processes (PMI_SIZE)"),
        # A step of one node inside a job of four: someone evaluates four models at once.
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NNODES": "1", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"SLURM_NNODES": "", "PMI_SIZE": "x"}, None),
        ({}, None),
    ],
)
def test_one_process_of_several_gets_a_note(env: dict[str, str], told: str | None) -> None:
    notes = launch_notes(env, num_nodes=1, world_size=1)
    assert len(notes) == (told is not None)
    assert all(str(told) in note and "scores everything by itself" in note for note in notes)


def test_a_run_over_all_nodes_gets_none_and_one_of_each_node_does() -> None:
    env = {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert launch_notes(env, num_nodes=2, world_size=16) == []
    assert "2 nodes" in launch_notes(env, num_nodes=1, world_size=8)[0]
