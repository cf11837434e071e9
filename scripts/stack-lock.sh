#!/usr/bin/env bash
# Compile docker/STACK/requirements.in into a complete hashed lock (make stack-lock STACK=seed). Needs uv.
#   scripts/stack-lock.sh STACK [OUT]
# The date keeps the resolution where it was tested: packages uploaded later are not seen. Raise it on purpose only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stack=${1:?usage: stack-lock.sh seed|current [OUT]}
out=$(realpath -m "${2:-docker/$stack/requirements.lock}")
case "$stack" in
    seed) until=2025-12-27 ;;
    current) until=2026-11-29 ;;
    *) echo "stack-lock: unknown stack '$stack'; valid: seed, current" >&2; exit 2 ;;
esac
cd "docker/$stack"
uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --exclude-newer "$until" \
    --generate-hashes --custom-compile-command "make stack-lock STACK=$stack" requirements.in --output-file "$out"
if grep -nE '^(--|.*https?://)' "$out"; then
    echo "stack-lock: $out names an index or a URL (lines above)" >&2
    exit 1
fi
