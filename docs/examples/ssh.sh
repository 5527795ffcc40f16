#!/bin/bash
# Nodes that can be reached by ssh, with the same environment and files on each:
#   docs/examples/ssh.sh node0 node1
set -euo pipefail

nodes=("$@")
if (( ${#nodes[@]} < 2 )); then
    echo "usage: $0 NODE NODE ..." >&2
    exit 2
fi
id="ppl-$(date +%s)"

line="ppl-eval launch --nnodes ${#nodes[@]} --nproc_per_node 8 --rdzv_endpoint ${nodes[0]}:29500 --rdzv_id $id \
    -- --config llama3_1/8B_ppl batch_size=4"
pids=()
for node in "${nodes[@]}"; do
    # -tt ends the remote processes when this script is interrupted.
    ssh -tt "$node" "cd '$PWD' && source .venv/bin/activate && $line" < /dev/null > "$node.log" 2>&1 &
    pids+=($!)
done

failed=0
for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || { failed=1; echo "${nodes[$i]} failed; see ${nodes[$i]}.log" >&2; }
done
cat "${nodes[0]}.log"
exit "$failed"
