#!/bin/bash
# What the Slurm tests need, on Debian or Ubuntu, as root: a real Slurm (controller and node daemons), its
# authentication, network namespaces, and the linter for our scripts. Does nothing where all of it is there.
set -euo pipefail

missing=()
for pair in slurmctld:slurm-wlm slurmd:slurm-wlm munged:munge ip:iproute2 unshare:util-linux shellcheck:shellcheck; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends "${missing[@]}"
