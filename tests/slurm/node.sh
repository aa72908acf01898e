#!/bin/bash
# One node of the test cluster. Runs inside fresh network, IPC, mount, UTS and PID namespaces:
#   node.sh NAME WORK KEEP...   WORK: the cluster's folder; KEEP: folders that stay visible though they lie in /tmp
set -euo pipefail
name=$1 work=$2
shift 2

hostname "$name"
mount --make-rprivate /
mkdir -p "$work/$name/tmp" "$work/$name/old_tmp"
mount --rbind /tmp "$work/$name/old_tmp"
mount --bind "$work/$name/tmp" /tmp
for folder in "$@"; do
    case $folder in
    /tmp/*)
        mkdir -p "$folder"
        mount --rbind "$work/$name/old_tmp/${folder#/tmp/}" "$folder"
        ;;
    esac
done
umount -l "$work/$name/old_tmp"
mount -t tmpfs -o size=4g tmpfs /dev/shm
mount --bind "$work/hosts" /etc/hosts
exec slurmd -D -N "$name" -f "$work/slurm.conf" -L "$work/$name/slurmd.log"
