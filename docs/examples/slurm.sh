#!/bin/bash
# Two nodes of eight GPUs under SLURM: sbatch docs/examples/slurm.sh
#SBATCH --job-name=ppl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
set -euo pipefail

# The first node keeps the rendezvous. The job's number keeps two jobs on one node apart.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PET_RDZV_BACKEND=c10d
export PET_RDZV_ENDPOINT="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"
export PET_RDZV_ID="$SLURM_JOB_ID"
# Set these where nodes have several networks (see docs/multinode.md):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

srun --kill-on-bad-exit=1 tune run --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node 8 \
    distributed_ppl_eval --config llama3_1/8B_ppl batch_size=4 output_dir="runs/$SLURM_JOB_ID"
