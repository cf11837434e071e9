#!/usr/bin/env bash
# Make .venv from the hashed lock (called by make setup). Safe to interrupt: the stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        /usr/local/bin/python3.12 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    cat >&2 <<'TEXT'
slurmlight needs Python 3.12 with venv. Ways to get it:
  Ubuntu 24.04       sudo apt-get install python3.12-venv
  any distribution   pyenv install 3.12      (found under pyenv's versions folder by itself)
  conda              conda create -n py312 python=3.12 && make setup PYTHON=$(conda run -n py312 which python)
or name one:         make setup PYTHON=/path/to/python3.12
TEXT
    return 1
}

python=$(find_python)
if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "setup: installing the locked packages (about 5 GB the first time, a few minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
bash scripts/compile.sh
cat requirements.lock pyproject.toml | sha256sum > .venv/.setup
echo "setup: done"
