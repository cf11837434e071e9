#!/usr/bin/env bash
# The Slurm that the tests bring up: installed by apt where that is possible, else the tests that need it are skipped.
set -euo pipefail
if command -v slurmctld >/dev/null && command -v munged >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "tests: installing slurm-wlm and munge by apt"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null && exit 0
fi
echo "tests: slurm-wlm and munge are not installed and cannot be installed here; tests marked slurm will be skipped"
[ "${CI:-}" != true ]
