"""Two evaluations against each other: only where both asked the same questions in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.evaluate.config import EvalConfig, read_config
from slurmlight.evaluate.stats import mcnemar
from slurmlight.evaluate.store import Answer, read_parts
from slurmlight.evaluate.subject import Subject
from slurmlight.evaluate.summary import EVALUATORS, verdicts
from slurmlight.files import read_json


def find_other(folder: Path, config: EvalConfig, subject: Subject) -> Path | None:
    """What to compare with: the evaluation asked for, else a finished one of the base model beside this one that fits."""
    if config.against:
        return Path(config.against)
    for other in sorted(folder.parent.glob("baseline*")):
        if other != folder and (other / "finished.json").exists() and _fits(config, subject, other):
            return other
    return None


def _fits(config: EvalConfig, subject: Subject, other: Path) -> bool:
    """Nobody asked for that comparison: a folder of another version is no reason to fail."""
    try:
        return not mismatch(config, subject, other)
    except UserError:
        return False


def mismatch(config: EvalConfig, subject: Subject, other: Path) -> str:
    """Why the evaluation in ``other`` measures something else; "" where the two can be compared."""
    theirs, kept = read_config(other), read_json(other / "subject.json")
    if not isinstance(kept, dict):
        return "it has not begun"
    if theirs.measure != config.measure:
        return f"it is {theirs.measure}, this is {config.measure}: two different measures"
    if kept["data_sha256"] != subject.data_sha256:
        return f"it asked other questions ({theirs.data}, {kept['questions']}; here {config.data}, {subject.questions})"
    if kept["databases"] != subject.databases:
        return f"it ran on other databases ({kept['databases']}; here {subject.databases})"
    if theirs.instances != config.instances:  # ``databases`` names all that lie there, used or not
        return f"it judged on {theirs.instances} instances of each database, this on {config.instances}: two different measures"
    return ""


def check_other(config: EvalConfig, subject: Subject, other: Path) -> None:
    """Raises UserError where a comparison with ``other`` would say nothing."""
    if why := mismatch(config, subject, other):
        raise UserError(f"{other} cannot be compared with: {why}", "evaluate both in the same way, or leave --against out")


def compare(answers: list[Answer], other: Path) -> dict[str, Any]:
    """Questions won and lost against ``other`` by each evaluator, over those both answered, and McNemar's exact test.

    For sampled evaluations a question is won where more of its samples are right than before.
    """
    before = {one.key: one for one in read_parts(other)}
    kept = read_json(other / "subject.json") or {}
    found: dict[str, Any] = {"evaluation": other.name, "label": kept.get("label", other.name), "evaluators": {}}
    for evaluator in EVALUATORS:
        final, _ = verdicts(evaluator)
        pairs: dict[int, list[tuple[Answer, int, int]]] = {}
        for one in answers:
            old = before.get(one.key)
            now = final(one)
            if old is not None and now is not None and (then := final(old)) is not None:
                pairs.setdefault(one.index, []).append((one, then, now))
        gains = [(group[0][0], sum(now - then for _, then, now in group)) for _, group in sorted(pairs.items())]
        won = [one for one, gain in gains if gain > 0]
        lost = [one for one, gain in gains if gain < 0]
        found["evaluators"][evaluator] = {
            "questions": len(pairs),
            "right_before": sum(then for group in pairs.values() for _, then, _ in group),
            "right_now": sum(now for group in pairs.values() for _, _, now in group),
            "won": [_question(one, before[one.key]) for one in won],
            "lost": [_question(one, before[one.key]) for one in lost],
            "p": mcnemar(len(won), len(lost)),
        }
    return found


def _question(now: Answer, before: Answer) -> dict[str, Any]:
    return {
        "index": now.index,
        "question": now.question,
        "db_id": now.db_id,
        "gold": now.gold,
        "before": before.answer,
        "now": now.answer,
    }
