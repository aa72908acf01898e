#!/bin/bash
# One node's part of a job step: `srun` starts it once on every node, in the container where there is one.
#   task.sh COMMAND ARGUMENT...
# Reads JETRL_RUN_DIR (folder of this run, on a file system that all nodes share) and JETRL_BIN (optional: the bin
# folder of the virtual environment to use).
set -u
# Slurm signals this shell together with the command. The command decides what to do; the shell waits for its answer.
trap : TERM USR1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=slurm/env.sh
. "$root/slurm/env.sh"
export PATH="${JETRL_BIN:+$JETRL_BIN:}$PATH"
# The code beside this script, not the one that the virtual environment was made from.
export PYTHONPATH="$root/.packages${PYTHONPATH:+:$PYTHONPATH}"
if ! command -v jetrl >/dev/null; then
    echo "error: no jetrl on $(hostname): set JETRL_BIN (python.bin of the site file) to the bin folder of the virtual environment, or use an image that has it" >&2
    exit 127
fi

if [ "${SLURM_NODEID:-0}" = 0 ]; then
    echo "environment of this job (slurm/env.sh):"
    for name in ${JETRL_ENV_NAMES//,/ }; do
        echo "  $name=${!name}"
    done
fi

"$@"
code=$?

# 85 (jetrl_megatron/signals.py): saved, and wants to come back. Success for srun, which would otherwise kill the
# nodes that are a moment behind; the batch script finds the file and re-queues the job.
if [ "$code" = 85 ]; then
    : >"$JETRL_RUN_DIR/requeue-${SLURM_JOB_ID:-0}"
    exit 0
fi
exit "$code"
