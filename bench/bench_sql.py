"""How fast SQL is judged, and where the time goes: ``make bench-sql`` (or ``python bench/bench_sql.py [--json]``).

On the recorded Spider dev pairs where SLURMLIGHT_SHARED (or ../shared) holds them, else on the generated toy data. All rates
are pairs per CPU-second of one process, from the best of several rounds: what else runs on the machine makes them lower.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import platform
import random
import resource
import sqlite3
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmlight.rewards import sql as rewards
from slurmlight.rewards.sql import Evaluator, execution_match
from slurmlight.sql.compare import same
from slurmlight.sql.execute import close_all, execute
from slurmlight.sql.guard import read_only_uri
from slurmlight.sql.worker import Worker

REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDS = 5
type Job = Callable[[Path, str, str], object]
type Pairs = list[tuple[Path, str, str]]  # database, gold, prediction


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        name, pairs = spider_pairs(Path(folder)) or toy_pairs(Path(folder))
        report = {
            "data": name,
            "pairs": len(pairs),
            **versions(),
            **rates(pairs),
            **widest(pairs),
            **cold_start(pairs[0][0]),
        }
    if "--json" in sys.argv:
        print(json.dumps(report))
        return
    for key, value in report.items():
        print(f"{key:36} {value:,.4g}" if isinstance(value, float) else f"{key:36} {value}")


def spider_pairs(folder: Path) -> tuple[str, Pairs] | None:
    data = Path(os.environ.get("SLURMLIGHT_SHARED") or REPOSITORY.parent / "shared") / "data"
    if not (data / "verdicts-a.tsv.gz").exists():
        return None
    with tarfile.open(data / "spider.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    with gzip.open(data / "verdicts-a.tsv.gz", "rt", encoding="utf8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    base = folder / "spider" / "database"
    pairs = [(base / row["db_id"] / f"{row['db_id']}.sqlite", row["gold"], row["pred"]) for row in rows]
    return "spider-dev, rebuilt, one database each, wta_1 synthetic; predictions of 11 systems", pairs


def toy_pairs(folder: Path) -> tuple[str, Pairs]:
    from pyarrow import parquet

    from slurmlight.data import toy

    toy.ensure(folder)
    rows = parquet.read_table(folder / "train.parquet", columns=["db_id", "query"]).to_pylist()
    pairs = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        database = folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
        pairs.append((database, row["query"], f"/* same */ {row['query']}"))
        if other["db_id"] == row["db_id"]:
            pairs.append((database, row["query"], other["query"]))
    return "generated toy data, one database each", pairs


def versions() -> dict[str, Any]:
    return {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "date": time.strftime("%Y-%m-%d")}


def rates(pairs: Pairs) -> dict[str, float]:
    """Each pair is timed by itself and counts with its best round: the sum of these is the time of all."""

    def judge(evaluator: Evaluator, forget: bool) -> Job:
        def run(database: Path, gold: str, pred: str) -> None:
            if forget:
                rewards._outcomes.clear()
            execution_match(gold, pred, [database], evaluator)

        return run

    jobs: dict[str, Job] = {
        "remembering": judge("strict", False),
        "strict": judge("strict", True),
        "official": judge("official", True),
        "executor": lambda database, gold, pred: execute(database, pred),
        "bare": bare_sqlite(pairs),
    }
    best = {name: [float("inf")] * len(pairs) for name in jobs}
    for round_number in range(ROUNDS + 1):
        rewards._outcomes.clear()
        for name, job in jobs.items():  # in turn, so that a slow minute of the machine meets all of them
            for at, pair in enumerate(pairs):
                start = time.process_time()
                job(*pair)
                if round_number:  # the first round fills the cache of gold results
                    best[name][at] = min(best[name][at], time.process_time() - start)
            rewards._outcomes.clear()
    rate = {name: len(pairs) / sum(times) for name, times in best.items()}
    two = sorted(range(len(pairs)), key=best["bare"].__getitem__)[-2:]
    rest = [sum(times) - sum(times[at] for at in two) for times in (best["strict"], best["bare"])]
    return {
        "strict, pairs/CPU-s": rate["remembering"],
        "strict, each prediction run": rate["strict"],
        "strict, without the 2 slowest": (len(pairs) - 2) / rest[0],
        "official, each prediction run": rate["official"],
        "executor alone, full results": rate["executor"],
        "bare sqlite3": rate["bare"],
        "bare sqlite3, without the 2 slowest": (len(pairs) - 2) / rest[1],
        "ms of SQLite: the 2 slowest": 1e3 * sum(best["bare"][at] for at in two),
        "us a pair: SQLite": 1e6 / rate["bare"],
        "us a pair: guards, compare, the rest": 1e6 / rate["strict"] - 1e6 / rate["bare"],
        "median us a pair: SQLite": 1e6 * statistics.median(best["bare"]),
        "median us a pair: strict": 1e6 * statistics.median(best["strict"]),
    }


def bare_sqlite(pairs: Pairs) -> Job:
    """The same predictions on unguarded kept connections, as many rows as strict fetches: what nothing can be faster than."""
    connections: dict[Path, sqlite3.Connection] = {}
    counts: dict[tuple[Path, str], int] = {}
    for database, gold, _ in pairs:
        if database not in connections:
            connection = sqlite3.connect(read_only_uri(database), uri=True, isolation_level=None, cached_statements=0)
            connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            connection.execute("PRAGMA temp_store=2")
            connection.execute("BEGIN")
            connections[database] = connection
        counts[database, gold] = len(execute(database, gold).rows) + 1

    def run(database: Path, gold: str, pred: str) -> None:
        with contextlib.suppress(sqlite3.Error):
            connections[database].execute(pred).fetchmany(counts[database, gold])

    return run


def widest(pairs: Pairs) -> dict[str, Any]:
    """The gold result with the most columns: against itself permuted in rows and columns, and against one wrong value."""
    rows = max(
        (execute(database, gold).rows for database, gold, _ in dict.fromkeys((d, g, "") for d, g, _ in pairs)),
        key=lambda rows: (len(rows[0]) if rows else 0, len(rows)),
    )
    chance = random.Random(0)
    order = chance.sample(range(len(rows[0])), len(rows[0]))
    permuted = [tuple(row[at] for at in order) for row in chance.sample(rows, len(rows))]
    wrong = [*permuted[:-1], (*permuted[-1][:-1], "another value")]
    best = {name: min(cpu(lambda: same(rows, pred)) for _ in range(ROUNDS)) for name, pred in (("y", permuted), ("n", wrong))}  # noqa: B023
    return {
        "widest gold, columns x rows": f"{len(rows[0])} x {len(rows)}",
        "widest gold, ms, permuted match": 1e3 * best["y"],
        "widest gold, ms, no match": 1e3 * best["n"],
    }


def cold_start(database: Path) -> dict[str, float]:
    """From a fresh interpreter to the first rows (wall, less the bare interpreter), a first connection, a worker process."""
    code = f"from pathlib import Path; from slurmlight.sql.execute import execute; execute(Path({str(database)!r}), 'SELECT 1')"
    started = [min(child_cpu(program) for _ in range(ROUNDS)) for program in (code, "pass")]

    def first_connection() -> None:
        close_all()
        execute(database, "SELECT 1")

    def first_worker() -> None:
        with Worker() as worker:
            worker.execute(database, "SELECT 1")

    return {
        "cold start, CPU ms: import + first query": 1e3 * (started[0] - started[1]),
        "cold start, CPU ms: first connection": 1e3 * min(cpu(first_connection) for _ in range(ROUNDS)),
        "cold start, wall ms: worker process": 1e3 * min(wall(first_worker) for _ in range(ROUNDS)),
    }


def child_cpu(program: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu(job: Callable[[], Any]) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def wall(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
