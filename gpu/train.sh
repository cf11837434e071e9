#!/usr/bin/env bash
# Train a preset here without Slurm and leave what came of it in OUT:  gpu/train.sh PRESET RUN_FOLDER SECONDS [key=value ...]
# A second call with the same folder resumes (with the keys of the second call). After SECONDS the run is asked to stop (it
# saves); 90 s later it is ended.
set -uo pipefail
preset=$1 run=$2 limit=$3; shift 3
out=${OUT:-$run/out}; mkdir -p "$out" "$run"
export PYTHONPATH="${SITE:-}:$PWD/src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
export RAY_memory_monitor_refresh_ms=0  # a lent machine's memory grows with its use: Ray would take it for full
python3 - "$preset" "$run" "$@" <<'PY' || exit
import json, sys
from pathlib import Path
from slurmlight.presets import load, to_json
Path(sys.argv[2], "config.json").write_text(json.dumps(to_json(load(sys.argv[1], sys.argv[3:]))))
PY
python3 gpu/busy.py "$run" "$out/busy.json" & busy=$!
began=$(date +%s)
stamp='import sys, time
began = time.time()
for line in sys.stdin:
    print(f"{time.time() - began:7.1f} {line}", end="", flush=True)'
# in the foreground: else its TERM would go to Ray and vLLM, too, and a step under way could not end
timeout --foreground --signal=TERM --kill-after=90 "$limit" python3 -m slurmlight.train.main "$run" 2>&1 | python3 -c "$stamp" >> "$run/log.txt"
echo "rc=${PIPESTATUS[0]} seconds=$(( $(date +%s) - began ))" | tee -a "$run/log.txt"
kill "$busy"; wait "$busy" 2>/dev/null
cp "$run/metrics.jsonl" "$run/status.json" "$run/config.json" "$out/" 2>/dev/null
gzip -c "$run/log.txt" > "$out/log.txt.gz"
tail -n 25 "$run/log.txt" | cut -c1-300
