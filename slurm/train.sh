#!/bin/bash
# What every node of a training job runs (through task.sh):
#   train.sh RECIPE [--set KEY=VALUE ...]
# Reads JETRL_RUN_DIR. Node 0 first checks the recipe and makes what is missing (a tiny model) while the others wait;
# then all train, continuing the run that JETRL_RUN_DIR holds. With JETRL_EXPORT=1 node 0 exports the result.
set -euo pipefail

recipe=$1
shift
node=${SLURM_NODEID:-0}
# Signals that ask to save are for the processes below; this shell outlives them to pass on the answer. Before training
# there is nothing to save: just come back later (85, see task.sh).
asked=""
trap 'asked=yes' TERM USR1
ready="$JETRL_RUN_DIR/ready-${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}"
if [ "$node" = 0 ]; then
    code=0
    JETRL_NNODES=1 JETRL_NODE_RANK=0 python -m jetrl_megatron.commands.prepare_job "$recipe" "$@" || code=$?
    [ -z "$asked" ] || exit 85
    [ "$code" = 0 ] || exit "$code"
    rm -f "$JETRL_RUN_DIR"/ready-*
    : >"$ready"
else
    # srun ends this wait if node 0 fails.
    until [ -e "$ready" ]; do
        [ -z "$asked" ] || exit 85
        sleep 1
    done
fi

resume=()
if [ -e "$JETRL_RUN_DIR/metrics.jsonl" ]; then
    resume=(--resume)
fi
code=0
jetrl train "$recipe" --output "$JETRL_RUN_DIR" "${resume[@]}" "$@" || code=$?
if [ "$code" = 0 ] && [ "$node" = 0 ] && [ "${JETRL_EXPORT:-0}" = 1 ]; then
    python -m jetrl_megatron.commands.export_run "$JETRL_RUN_DIR"
fi
exit "$code"
