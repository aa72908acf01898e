#!/bin/bash
# What every node of a training job runs (through task.sh):
#   train.sh RECIPE [--set KEY=VALUE ...]
# Reads JETRL_RUN_DIR. Node 0 first checks the recipe and makes what is missing (a tiny model, the Hugging Face form of
# a Megatron checkpoint) while the others wait; then all train, continuing the run that JETRL_RUN_DIR holds. With
# JETRL_EXPORT=1 node 0 exports the result. Whatever is interrupted goes on, or starts again, when the job comes back.
set -euo pipefail
# Signals that ask to save are for the processes below; this shell outlives them to pass on the answer.
asked=""
trap 'asked=yes' TERM USR1

recipe=$1
shift
node=${SLURM_NODEID:-0}
mark="${SLURM_JOB_ID:-0}-${SLURM_RESTART_COUNT:-0}"

# Run a command. If the signal itself ended it (128 + SIGTERM or SIGUSR1), it had nothing to save: come back (85, see
# task.sh).
step() {
    local code=0
    "$@" || code=$?
    if [ -n "$asked" ] && { [ "$code" = 143 ] || [ "$code" = 138 ]; }; then code=85; fi
    [ "$code" = 0 ] || exit "$code"
}

say() {
    : >"$JETRL_RUN_DIR/$1-$mark"
}

# Wait until node 0 has said so; srun ends this wait if node 0 fails. Listing the folder asks a file server anew.
hear() {
    until [[ $'\n'$(ls "$JETRL_RUN_DIR")$'\n' == *$'\n'"$1-$mark"$'\n'* ]]; do
        [ -z "$asked" ] || exit 85
        sleep 1 || true # the signal ends it too
    done
}

if [ "$node" = 0 ]; then
    rm -f "$JETRL_RUN_DIR"/ready-* "$JETRL_RUN_DIR"/exported-*
    JETRL_NNODES=1 JETRL_NODE_RANK=0 step python -m jetrl_megatron.commands.prepare_job "$recipe" "$@"
    [ -z "$asked" ] || exit 85
    say ready
else
    hear ready
fi

step jetrl train "$recipe" --output "$JETRL_RUN_DIR" --resume "$@"

if [ "${JETRL_EXPORT:-0}" = 1 ]; then
    # A node that left early would make srun end the others.
    if [ "$node" = 0 ]; then
        step python -m jetrl_megatron.commands.export_run "$JETRL_RUN_DIR"
        say exported
    else
        hear exported
    fi
fi
