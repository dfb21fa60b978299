#!/bin/bash
# What a pod of torchrun.yaml runs: torchrun, again and again until the run has ended.
#
#   NODES=2 JOB_COMPLETION_INDEX=0 examples/launch/kubernetes/ranks.sh HEAD FOLDER [ARGUMENTS...]
#
# When one pod is told to stop, the ranks of all save and end well, and so does torchrun; yet only that pod is taken away.
# A torchrun that fails MOST_FAILURES times in a row ends the pod with its exit code, and the Job counts that failure.
head=$1 folder=$2 failures=0
shift 2

until [ -e "$folder/model.pt" ]; do
    "$(dirname "$0")/../torchrun.sh" --nnodes "$NODES" --node-rank "$JOB_COMPLETION_INDEX" \
        --nproc-per-node "${RANKS_PER_NODE:-1}" --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint "$head:${MASTER_PORT:-29500}" --rdzv-id "${RUN:-run}" \
        "${SCRIPT:-examples/resumable.py}" "$folder" "$@" &
    ranks=$!
    trap 'kill -TERM $ranks; wait $ranks; exit 75' TERM # 75: start me again, elsewhere
    wait $ranks
    code=$?
    if [ $code = 0 ]; then failures=0; else failures=$((failures + 1)); fi
    if [ $failures -ge "${MOST_FAILURES:-5}" ]; then exit $code; fi
    sleep "${WAIT:-5}"
done
