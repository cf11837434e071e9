"""Score a file of predictions: every pair judged in killable processes, then counted by hardness, kind and reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slurmlight.errors import UserError
from slurmlight.files import write_atomic
from slurmlight.rewards.pairs import Pair, instances
from slurmlight.rewards.sql import IN_TIES, Evaluator, Unscorable, Verdict, execution_match
from slurmlight.sql import published
from slurmlight.sql.execute import DEFAULT, Limits
from slurmlight.sql.hardness import LEVELS, hardness
from slurmlight.sql.order import top_level_order
from slurmlight.sql.worker import Died, Overdue, Worker

GROUP = 64  # pairs of one database that one worker takes at a time: it keeps connections and golds warm
_DISTINCT = re.compile(r"\bDISTINCT\b", re.IGNORECASE)
START_S = 5.0  # what a call may take beside its queries (loading and comparing a large result)


@dataclass(frozen=True)
class Scored:
    """A pair and its verdict, or why there is none."""

    pair: Pair
    verdict: Verdict | None
    unscorable: str = ""  # Unscorable.kind where there is no verdict
    reason: str = ""


def score(
    pairs: Sequence[Pair],
    db_dir: Path,
    evaluator: Evaluator,
    workers: int = 1,
    limits: Limits = DEFAULT,
    keep_distinct: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[Scored]:
    """Judge every pair, in the order given. ``progress`` is called once a pair, from several threads."""
    files = {db_id: instances(db_dir, db_id) for db_id in {pair.db_id for pair in pairs}}
    results: dict[int, Scored] = {}
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(Worker()))

        def take(group: list[Pair]) -> None:
            worker = idle.get()
            try:
                for pair in group:
                    results[pair.index] = judge(worker, pair, files[pair.db_id], evaluator, limits, keep_distinct)
                    progress()
            finally:
                idle.put(worker)

        pool = stack.enter_context(ThreadPoolExecutor(workers))
        try:
            for _ in pool.map(take, _groups(pairs)):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[pair.index] for pair in pairs]


def _groups(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    by_database: dict[str, list[Pair]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: pair.gold):
        by_database[pair.db_id].append(pair)
    for group in by_database.values():
        for start in range(0, len(group), GROUP):
            yield group[start : start + GROUP]


def judge(
    worker: Worker, pair: Pair, databases: Sequence[Path], evaluator: Evaluator, limits: Limits, keep_distinct: bool
) -> Scored:
    """The verdict of one pair; a pair that had to be killed is 0 if its gold alone can be judged."""
    if not databases:
        return Scored(pair, None, "database", f"no *.sqlite file for {pair.db_id}")
    call = (list(databases), evaluator, limits, keep_distinct)
    patience = START_S + 2.2 * limits.timeout_s * len(databases)
    try:
        try:
            return Scored(pair, worker.call(execution_match, pair.gold, pair.pred, *call, timeout_s=patience))
        except (Overdue, Died) as failure:
            ended = ("timeout", "killed") if isinstance(failure, Overdue) else ("too_large", "memory")
        worker.call(execution_match, pair.gold, pair.gold, *call, timeout_s=patience)
    except Unscorable as error:
        return Scored(pair, None, error.kind, error.message)
    except (Overdue, Died):
        return Scored(pair, None, "gold_timeout", "the gold had to be killed")
    return Scored(pair, Verdict(0, ended[0], "had to be killed", False, evaluator, ended[1]))


def summary(scored: Sequence[Scored], evaluator: Evaluator, keep_distinct: bool, database_set: str) -> dict[str, Any]:
    """Counts and accuracies (correct / scored, None where nothing was scored) as JSON values."""
    judged = [(item, item.verdict) for item in scored if item.verdict is not None]
    levels: dict[str, list[int]] = {level: [] for level in LEVELS}
    databases: dict[str, list[int]] = defaultdict(list)
    for item, verdict in judged:
        levels[hardness(item.pair.gold)].append(verdict.score)
        databases[item.pair.db_id].append(verdict.score)
    failed = ("error", "timeout", "too_large", "refused")
    return {
        "evaluator": evaluator,
        "keep_distinct": keep_distinct or evaluator == "strict",
        "database_set": database_set,
        **_rate([verdict.score for _, verdict in judged]),
        "pairs": len(scored),
        "unscorable": len(scored) - len(judged),
        "unscorable_by_kind": dict(Counter(item.unscorable for item in scored if item.verdict is None)),
        "vacuous_matches": sum(verdict.vacuous and verdict.score for _, verdict in judged),
        "kinds": dict(Counter(verdict.kind for _, verdict in judged).most_common()),
        "errors": dict(Counter(verdict.error for _, verdict in judged if verdict.kind in failed).most_common()),
        "by_hardness": {level: _rate(scores) for level, scores in levels.items()},
        "by_database": {db_id: _rate(scores) for db_id, scores in sorted(databases.items())},
    }


def _rate(scores: Sequence[int]) -> dict[str, Any]:
    return {"accuracy": sum(scores) / len(scores) if scores else None, "correct": sum(scores), "scored": len(scores)}


def write_verdicts(path: Path, scored: Sequence[Scored]) -> None:
    """``path`` as Parquet: index, db_id, gold, pred, verdict (0, 1, null for none), reason, vacuous. Raises UserError."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "index": pyarrow.array([item.pair.index for item in scored], pyarrow.int64()),
        "db_id": pyarrow.array([_utf8(item.pair.db_id) for item in scored], pyarrow.string()),
        "gold": pyarrow.array([_utf8(item.pair.gold) for item in scored], pyarrow.string()),
        "pred": pyarrow.array([_utf8(item.pair.pred) for item in scored], pyarrow.string()),
        "verdict": pyarrow.array([item.verdict and item.verdict.score for item in scored], pyarrow.int8()),
        "reason": pyarrow.array([_utf8(_reason(item)) for item in scored], pyarrow.string()),
        "vacuous": pyarrow.array([bool(item.verdict and item.verdict.vacuous) for item in scored], pyarrow.bool_()),
    }
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), buffer)
    try:
        write_atomic(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})", "give another --out") from None


def _utf8(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _reason(item: Scored) -> str:
    if item.verdict is None:
        return f"unscorable: {item.unscorable}: {item.reason}"
    verdict = item.verdict
    name = f"{verdict.kind}/{verdict.error}" if verdict.error and verdict.error != verdict.kind else verdict.kind
    return f"{name}: {verdict.reason}" if verdict.reason else name


def differences(strict: Sequence[Scored], official: Sequence[Scored]) -> dict[str, int]:
    """Why the two evaluators disagree, counted: "official 1, strict 0: DISTINCT is stripped" and the like."""
    found: Counter[str] = Counter()
    for ours, theirs in zip(strict, official, strict=True):
        if ours.verdict is None or theirs.verdict is None:
            if ours.verdict is not theirs.verdict:
                found["only one evaluator has a verdict"] += 1
        elif ours.verdict.score != theirs.verdict.score:
            side = f"official {theirs.verdict.score}, strict {ours.verdict.score}"
            found[f"{side}: {why_different(ours.pair, ours.verdict)}"] += 1
    return dict(found.most_common())


def why_different(pair: Pair, strict: Verdict) -> str:
    """The rule that makes strict's verdict differ from official's, from what strict saw and from the texts."""
    if strict.error == "not_a_query":
        return "not a query"
    if strict.error == "statements":
        return "text after the first semicolon"
    if strict.kind in ("refused", "too_large", "timeout"):
        return f"{strict.kind} under the strict limits"
    if published.glued(pair.pred) != pair.pred and strict.kind == "error":
        return "a split operator is not repaired"
    if strict.kind == "columns" and strict.vacuous:
        return "empty results of different widths"
    if any(_DISTINCT.search(text) for text in (pair.gold, pair.pred)):
        return "DISTINCT counts"
    if strict.reason == IN_TIES:
        return "rows that tie may come in any order"
    if (top_level_order(pair.gold) is not None) != published.order_matters(pair.gold):
        return "order matters by a top-level ORDER BY only"
    return "numbers within the tolerance" if strict.score else "values that only look alike"
