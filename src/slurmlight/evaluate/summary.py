"""Answers -> figures as JSON values. One measure has one name: greedy accuracy, mean@n and pass@n never share a key."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.stats import mean_interval, wilson
from slurmlight.evaluate.store import Answer, Key
from slurmlight.evaluate.subject import Subject
from slurmlight.sql.hardness import LEVELS

Evaluator = Literal["strict", "official"]
EVALUATORS: tuple[Evaluator, ...] = ("strict", "official")
EXAMPLES = 3  # of each kind of failure
FAILED_SHOWN = 50  # episodes lost to infrastructure that are named

type Verdict = Callable[[Answer], int | None]


def summarise(
    name: str, config: EvalConfig, subject: Subject, answers: Sequence[Answer], failed: Mapping[Key, str], seconds: float
) -> dict[str, Any]:
    """Everything a report says of one evaluation. ``seconds`` is what asking took, over all attempts."""
    asked = subject.questions * config.samples
    return {
        "evaluation": name,
        "subject": asdict(subject),
        "kind": config.kind,
        "measure": config.measure,
        "greedy": config.greedy,
        "samples": config.samples,
        "temperature": config.temperature,
        "data": config.data,
        "complete": len(answers) == asked,
        "asked": asked,
        "answered": len(answers),
        "lost": asked - len(answers),
        "lost_examples": [_lost(key, why) for key, why in sorted(failed.items())[:FAILED_SHOWN]],
        "unscorable": dict(Counter(one.unscorable for one in answers if one.unscorable)),
        "evaluators": {evaluator: _evaluator(evaluator, config, answers) for evaluator in EVALUATORS},
        "disagree": _disagree(answers),
        "turns": _turns(answers),
        "tokens": {
            "prompt_mean": _mean(one.prompt_tokens for one in answers),
            "completion_mean": _mean(one.completion_tokens for one in answers),
        },
        "episode_seconds": _seconds([one.seconds for one in answers]),
        "seconds": round(seconds, 1),
        "episodes_per_second": round(len(answers) / seconds, 2) if seconds else None,
        "failures": _failures(answers),
    }


def _lost(key: Key, why: str) -> dict[str, Any]:
    return {"index": key[0], "sample": key[1], "why": why}


def _evaluator(evaluator: Evaluator, config: EvalConfig, answers: Sequence[Answer]) -> dict[str, Any]:
    final, first = verdicts(evaluator)
    scored = [one for one in answers if final(one) is not None]
    both = [(first(one) or 0, final(one) or 0) for one in scored if first(one) is not None]
    by_database = _groups(scored, lambda one: one.db_id)
    by_hardness = _groups(scored, lambda one: one.hardness)
    return rate(scored, final, config) | {
        "vacuous_matches": sum(one.vacuous and final(one) == 1 for one in scored),
        "by_hardness": {level: rate(by_hardness.get(level, []), final, config) for level in LEVELS},
        "by_database": {db_id: rate(by_database[db_id], final, config) for db_id in sorted(by_database)},
        "loop": {
            "first_right": sum(one for one, _ in both),
            "final_right": sum(two for _, two in both),
            "gained": sum(one < two for one, two in both),
            "spoiled": sum(one > two for one, two in both),
            "episodes": len(both),
        },
    }


def verdicts(evaluator: Evaluator) -> tuple[Verdict, Verdict]:
    """How that evaluator judged an answer's final and its first query."""
    if evaluator == "strict":
        return (lambda one: one.strict), (lambda one: one.first_strict)
    return (lambda one: one.official), (lambda one: one.first_official)


def rate(answers: Sequence[Answer], verdict: Verdict, config: EvalConfig) -> dict[str, Any]:
    """Greedy: ``accuracy`` with its Wilson interval. Sampled: ``mean@n`` and ``pass@n``, over questions with all n samples."""
    if config.greedy:
        right = sum(verdict(one) or 0 for one in answers)
        low, high = wilson(right, len(answers))
        share = right / len(answers) if answers else None
        return {"accuracy": share, "low": low, "high": high, "right": right, "questions": len(answers)}
    groups: dict[int, list[int]] = defaultdict(list)
    for one in answers:
        groups[one.index].append(verdict(one) or 0)
    whole = [group for group in groups.values() if len(group) == config.samples]
    means = [sum(group) / len(group) for group in whole]
    passed = sum(any(group) for group in whole)
    low, high = mean_interval(means)
    pass_low, pass_high = wilson(passed, len(whole))
    n = config.samples
    return {
        f"mean@{n}": statistics.fmean(means) if means else None,
        "low": low,
        "high": high,
        f"pass@{n}": passed / len(whole) if whole else None,
        "pass_low": pass_low,
        "pass_high": pass_high,
        "questions": len(whole),
    }


def _groups(answers: Iterable[Answer], key: Callable[[Answer], str]) -> dict[str, list[Answer]]:
    groups: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        groups[key(one)].append(one)
    return groups


def _disagree(answers: Iterable[Answer]) -> dict[str, int]:
    pairs = Counter((one.strict, one.official) for one in answers)
    return {"official_only": pairs[0, 1], "strict_only": pairs[1, 0]}


def _turns(answers: Sequence[Answer]) -> dict[str, dict[str, int]]:
    """Episodes by number of queries written: right and wrong (strict)."""
    found: dict[str, dict[str, int]] = {}
    for count in sorted({one.turns for one in answers}):
        these = [one for one in answers if one.turns == count and one.strict is not None]
        right = sum(one.strict or 0 for one in these)
        found[str(count)] = {"right": right, "wrong": len(these) - right}
    return found


def _failures(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Wrong answers (strict) by kind, most first, with examples from different databases."""
    groups = _groups(
        (one for one in answers if one.strict == 0),
        lambda one: f"{one.outcome}: {one.error}" if one.error and one.error != one.outcome else one.outcome,
    )
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [{"kind": kind, "count": len(group), "examples": [example(one) for one in _spread(group)]} for kind, group in ranked]


def _spread(answers: Sequence[Answer]) -> list[Answer]:
    seen: Counter[str] = Counter()
    ranked = []
    for one in answers:
        seen[one.db_id] += 1
        ranked.append((seen[one.db_id], one.key, one))
    return [one for *_, one in sorted(ranked, key=lambda item: item[:2])[:EXAMPLES]]


def example(one: Answer) -> dict[str, Any]:
    names = ("index", "question", "db_id", "hardness", "gold", "answer", "reason")
    return {name: getattr(one, name) for name in names}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(statistics.fmean(found), 1) if found else None


def _seconds(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }
