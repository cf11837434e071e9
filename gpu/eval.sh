#!/usr/bin/env bash
# Evaluate here without Slurm, greedily:  gpu/eval.sh FOLDER PRESET DATA run RUN_FOLDER | url ENDPOINT [key=value ...]
# FOLDER gets the evaluation, FOLDER/busy.json the GPU's busy share by phase.
set -uo pipefail
folder=$1 preset=$2 data=$3 kind=$4 what=$5; shift 5
export PYTHONPATH="${SITE:-}:$PWD/src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
mkdir -p "$folder"
python3 - "$folder" "$preset" "$data" "$kind" "$what" "$@" <<'PY' || exit
import json, sys
from pathlib import Path
from slurmlight.evaluate.config import SERVED_IN_FLIGHT, EvalConfig, to_json
from slurmlight.presets import load
from slurmlight.presets import to_json as plain
folder, preset, data, kind, what, *keys = sys.argv[1:]
common = {"preset": plain(load(preset, keys)), "data": data, "database_dir": str(Path(data).parent / "database")}
which = {"kind": "endpoint", "endpoint": what, "model": "policy"} if kind == "url" else {"kind": "checkpoint", "run": what}
config = EvalConfig(**common, **which, in_flight=SERVED_IN_FLIGHT)
Path(folder, "config.json").write_text(json.dumps(to_json(config)))
PY
python3 gpu/busy.py "$folder" "$folder/busy.json" & busy=$!
began=$(date +%s)
python3 -m slurmlight.evaluate.main "$folder" 2>&1 | tee "$folder/log.txt" | tail -n 25 | cut -c1-200
echo "rc=${PIPESTATUS[0]} seconds=$(( $(date +%s) - began ))"
kill "$busy"; wait "$busy" 2>/dev/null
