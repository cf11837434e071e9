#!/usr/bin/env bash
# Make .venv-seed: the seed stack's complete lock without flash-attn, pytest and the kit (called by make test-seed).
# 4.5 GB to download, 11 GB on disk. Safe to interrupt: the stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-seed lock=docker/seed/requirements.lock
stamp=$(sha256sum < "$lock")
[ "$(cat "$venv/.setup" 2>/dev/null)" != "$stamp" ] || exit 0
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    .venv/bin/python -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps)
echo "test-seed: installing the seed stack into $venv (4.5 GB the first time, minutes)"
"${pip[@]}" --require-hashes -r "$lock"
# pytest with its hashes, as locked for make test
tests=$(mktemp) && trap 'rm -f "$tests"' EXIT
awk '/^[A-Za-z0-9]/ { keep = /^(pytest|pluggy|iniconfig)==/ } keep' requirements.lock > "$tests"
"${pip[@]}" --require-hashes -r "$tests"
"${pip[@]}" --no-build-isolation --no-index -e .
echo "$stamp" > "$venv/.setup"
