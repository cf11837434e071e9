"""What a run tells of itself while it trains (console, metrics.jsonl, SwanLab) and at its end (curve, tables, examples)."""
