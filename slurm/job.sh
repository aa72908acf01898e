#!/bin/bash
# Shared by the batch scripts; `jetrl launch` copies it into the ones that it renders. Needs JETRL_RUN_DIR, the run's
# folder on a file system that all nodes share, and for `jetrl_srun` JETRL_ROOT, the repository.
# shellcheck disable=SC2317,SC2329  # called by the scripts that source this, and by traps

mkdir -p "$JETRL_RUN_DIR"
rm -f "$JETRL_RUN_DIR/requeue-$SLURM_JOB_ID"

# At the end of the batch script, whatever the reason: come back, or say what went wrong first.
jetrl_end() {
    local code=$1 first
    set +evx
    if [ "$code" = 0 ] && [ -e "$JETRL_RUN_DIR/requeue-$SLURM_JOB_ID" ]; then
        rm -f "$JETRL_RUN_DIR/requeue-$SLURM_JOB_ID"
        echo "job $SLURM_JOB_ID has saved its state and goes back into the queue (restart $((${SLURM_RESTART_COUNT:-0} + 1)))"
        # Refused where Slurm itself has re-queued the job already, as on preemption.
        scontrol requeue "$SLURM_JOB_ID" || true
        return
    fi
    [ "$code" != 0 ] || return 0
    first=$(find "$JETRL_RUN_DIR/errors" -name "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-*" 2>/dev/null | sort | head -n 1)
    echo "job $SLURM_JOB_ID failed with exit code $code, run folder $JETRL_RUN_DIR" >&2
    if [ -n "$first" ]; then
        echo "the first error of the job:" >&2
        cat "$first" >&2
    fi
}
# The batch shell outlives the signals that ask the ranks to save: it has the re-queue to do.
trap : TERM USR1
trap 'jetrl_end $?' EXIT

# Run a command on every node of the job (or with leading srun options, on fewer), one task each.
#   jetrl_srun [--OPTION=VALUE ...] COMMAND ARGUMENT...
jetrl_srun() {
    local options=(--ntasks-per-node=1 --kill-on-bad-exit=1 --wait=60 --cpu-bind=none)
    [ "${SLURM_NNODES:-1}" = 1 ] || options+=(--label)
    while [ "${1#--}" != "$1" ]; do
        options+=("$1")
        shift
    done
    # shellcheck source=slurm/env.sh
    . "$JETRL_ROOT/slurm/env.sh"
    if [ -n "${JETRL_CONTAINER_IMAGE:-}" ]; then
        options+=(--container-image="$JETRL_CONTAINER_IMAGE" --container-workdir="$JETRL_ROOT")
        options+=(--container-mounts="$JETRL_ROOT:$JETRL_ROOT,$JETRL_RUN_DIR:$JETRL_RUN_DIR${JETRL_CONTAINER_MOUNTS:+,$JETRL_CONTAINER_MOUNTS}")
        options+=(--container-env="$JETRL_ENV_NAMES,JETRL_RUN_DIR,JETRL_BIN")
    elif [ -z "${JETRL_BIN:-}" ] && [ -x "$JETRL_ROOT/.venv/bin/python" ]; then
        export JETRL_BIN=$JETRL_ROOT/.venv/bin
    fi
    srun "${options[@]}" bash "$JETRL_ROOT/slurm/task.sh" "$@"
}
