#!/usr/bin/env bash
# Compile what pip has put into .venv, on all cores; pip itself would take one, for minutes. Not left to the first import:
# PYTHONDONTWRITEBYTECODE may be set, and then every process would compile everything again.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true # some packages carry files that are no Python of today
