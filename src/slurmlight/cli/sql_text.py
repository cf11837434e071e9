"""What ``slurmlight sql`` prints: results, verdicts and reports, with every value made harmless for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slurmlight.rewards.score import Scored
from slurmlight.sql.execute import Result

SHOWN_ROWS, SHOWN_WIDTH, SHOWN_UNSCORABLE = 20, 60, 10


def check_json(databases: Sequence[Path], results: Mapping[str, Result], judged: Mapping[str, Scored]) -> dict[str, Any]:
    """Both results (their first rows; a BLOB as x'..') and both verdicts. ``score`` is None where there is no verdict."""
    shown = {
        name: {
            "kind": result.kind,
            "error": result.error,
            "message": result.message,
            "columns": result.columns,
            "row_count": len(result.rows) if result.kind == "rows" else None,
            "rows": [[_json_value(value) for value in row] for row in result.rows[:SHOWN_ROWS]],
            "seconds": round(result.seconds, 6),
        }
        for name, result in results.items()
    }
    verdicts = {name: _verdict_json(item) for name, item in judged.items()}
    return {"databases": [str(path) for path in databases], **shown, "verdicts": verdicts}


def _json_value(value: Any) -> Any:
    finite = not isinstance(value, float) or abs(value) < float("inf")
    return value if finite and not isinstance(value, bytes) else shown(value)


def _verdict_json(item: Scored) -> dict[str, Any]:
    verdict = item.verdict
    if verdict is None:
        return {"score": None, "kind": "unscorable", "error": item.unscorable, "reason": item.reason, "vacuous": False}
    keys = ("score", "kind", "error", "reason", "vacuous")
    return {key: getattr(verdict, key) for key in keys}


def print_check(results: Mapping[str, Result], judged: Mapping[str, Scored]) -> None:
    console = Console()
    for name, result in results.items():
        if result.kind != "rows":
            console.print(Text(f"{name}: {result.kind}: {shown(result.message)}\n"))
            continue
        more = f", first {SHOWN_ROWS}" if len(result.rows) > SHOWN_ROWS else ""
        console.print(f"{name}: {len(result.rows)} row{'s' * (len(result.rows) != 1)}{more}")
        table = Table()
        for column in result.columns:
            table.add_column(Text(shown(column)))
        for row in result.rows[:SHOWN_ROWS]:
            table.add_row(*(Text(shown(value)) for value in row))
        console.print(table)
    for name, item in judged.items():
        verdict = _verdict_json(item)
        score = "no verdict" if verdict["score"] is None else verdict["score"]
        reason = f" ({shown(verdict['reason'], 200)})" if verdict["reason"] else ""
        error = f" {verdict['error']}" if verdict["error"] else ""
        console.print(Text(f"{name:9}{score}  {verdict['kind']}{error}{reason}{', vacuous' if verdict['vacuous'] else ''}"))


def print_report(report: Mapping[str, Any], scored: Sequence[Scored], out: Path) -> None:
    console = Console()
    console.print(Text(f"evaluator {report['evaluator']}{'' if report['keep_distinct'] else ', DISTINCT stripped'}"))
    console.print(Text(f"databases {report['database_set']}"))
    table = Table("hardness", "pairs", "correct", "accuracy")
    for level, rate in [*report["by_hardness"].items(), ("all", report)]:
        accuracy = "-" if rate["accuracy"] is None else f"{100 * rate['accuracy']:.1f} %"
        table.add_row(level, str(rate["scored"]), str(rate["correct"]), accuracy)
    console.print(table)
    counts = {"verdicts": report["kinds"], "errors": report["errors"], "differences": report.get("differences", {})}
    for title, values in counts.items():
        if values:
            console.print(Text(f"{title}: " + ", ".join(f"{name} {count}" for name, count in values.items())))
    console.print(f"matches of two empty results (weak evidence): {report['vacuous_matches']}")
    if report["unscorable"]:
        console.print(f"unscorable (left out): {report['unscorable']}")
        for item in [item for item in scored if item.verdict is None][:SHOWN_UNSCORABLE]:
            console.print(Text(f"  {item.pair.index} {item.pair.db_id}: {item.unscorable}: {shown(item.reason, 200)}"))
    console.print(Text(f"verdicts: {out / 'verdicts.parquet'}"))


def shown(value: Any, width: int = SHOWN_WIDTH) -> str:
    """A value as SQL would write it, on one line, without control characters or lone surrogates."""
    if value is None or value == "NULL":
        return "NULL" if value is None else "'NULL'"
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text[: width + 1])
    return text if len(text) <= width else text[: width - 1] + "…"
