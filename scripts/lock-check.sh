#!/usr/bin/env bash
# Are the stacks' locks what their inputs resolve to, and do they install and import? (make lock-check; on demand: 20 GB.)
#   scripts/lock-check.sh [STACK ...]      RESOLVE_ONLY=1 leaves out the installation
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
modules="torch vllm verl agentlightning ray langgraph swanlab pyarrow"
for stack in "${@:-seed current}"; do
    for one in $stack; do
        cp "docker/$one/requirements.lock" "$work/$one.lock" # uv keeps what is in its output where the input still allows it
        scripts/stack-lock.sh "$one" "$work/$one.lock"
        diff "docker/$one/requirements.lock" "$work/$one.lock" || {
            echo "lock-check: docker/$one/requirements.lock is not what its input gives: make stack-lock STACK=$one" >&2
            exit 1
        }
        echo "lock-check: $one resolves to its lock ($(grep -c '^[a-z0-9].*==' "$work/$one.lock") packages)"
        [ -z "${RESOLVE_ONLY:-}" ] || continue
        uv venv --quiet --python 3.12 "$work/$one"
        VIRTUAL_ENV="$work/$one" uv pip sync --quiet --require-hashes "docker/$one/requirements.lock"
        (cd "$work" && PYTHONNOUSERSITE=1 CUDA_VISIBLE_DEVICES= "$work/$one/bin/python" - $modules <<'PYTHON'
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
print("lock-check: imports", *sys.argv[1:])
PYTHON
        )
        rm -rf "${work:?}/$one"
    done
done
