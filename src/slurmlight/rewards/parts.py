"""The kit's rewards: pure functions of a judged episode, each in [0, 1]. What each means: catalogue.py and docs/learning.md."""

from __future__ import annotations

import re
from collections.abc import Callable

from slurmlight.agents.contract import Episode, Turn
from slurmlight.agents.parse import parse
from slurmlight.rewards.judged import Judged
from slurmlight.rewards.overlap import execution_similarity, schema_linking

Reward = Callable[[Judged], float]

_NO_QUERY = {"syntax", "not_a_query", "statements", "null_character", "not_utf8"}  # names of sql.execute
_FENCE = re.compile(r"```(?:sql|sqlite)?[ \t]*\n(?P<body>.*?)\n?```", re.DOTALL | re.IGNORECASE)
_ATTEMPTS = ("write", "rewrite")


def execution_match(judged: Judged) -> float:
    """1 or 0: the verdict."""
    return float(judged.verdict.score)


def syntax(judged: Judged) -> float:
    """1 or 0: SQLite parses the answer as one query. Unknown names, time-outs and forbidden functions are no syntax errors."""
    return float(bool(judged.episode.answer.strip()) and judged.verdict.error not in _NO_QUERY)


def efficiency(judged: Judged) -> float:
    """Mean of (turns not needed / turns that could have been spared) and (tokens not used / tokens allowed)."""
    episode = judged.episode
    attempts = sum(turn.node in _ATTEMPTS for turn in episode.turns)
    spare = max(1, episode.task.max_turns - 1)
    tokens = sum(turn.completion_tokens for turn in episode.turns)
    allowed = judged.max_tokens * max(1, len(episode.turns), episode.task.max_turns)
    return (_share(attempts - 1, spare) + _share(tokens, allowed)) / 2


def speed(judged: Judged) -> float:
    """1 - seconds / time-out. Differs from one playing of an episode to the next."""
    return _share(judged.episode.seconds, judged.timeout_s)


def process(judged: Judged) -> float:
    """Mean of ``call_scores``; 0 where the episode does not begin with a query or its answer was never executed."""
    episode = judged.episode
    scores = call_scores(episode)
    if not scores or episode.turns[0].node != "write":
        return 0.0
    if not any(turn.sql == episode.answer and turn.outcome for turn in episode.turns):
        return 0.0
    return sum(scores) / len(scores)


def call_scores(episode: Episode) -> list[float]:
    """How well each call kept to write -> execute -> check -> rewrite, by what executing gave and not by the gold.

    A query: 1 where it returned rows, 0.5 where it returned none, 0 where it failed, was missing or repeats an earlier one.
    A check: 1 where it asked for a fix of an empty result or let rows stand, 0.5 where it asked for a fix of rows (only the
    gold could say), 0 where it let an empty result stand.
    """
    scores, seen = [], set()
    for place, turn in enumerate(episode.turns):
        if turn.node in _ATTEMPTS:
            repeated = turn.sql in seen
            seen.add(turn.sql)
            scores.append(0.0 if repeated or not turn.sql else {"rows": 1.0, "empty": 0.5}.get(turn.outcome, 0.0))
        else:
            scores.append(_check_score(episode.turns, place))
    return scores


def _check_score(turns: tuple[Turn, ...], place: int) -> float:
    asked = place + 1 < len(turns) and turns[place + 1].node == "rewrite"
    rows = place > 0 and turns[place - 1].outcome == "rows"
    if asked:
        return 0.5 if rows else 1.0
    return 1.0 if rows else 0.0


def format_(judged: Judged) -> float:
    """Share of the write and rewrite calls whose text is one query, bare or in one fence, and nothing else."""
    texts = [turn.completion for turn in judged.episode.turns if turn.node in _ATTEMPTS]
    return sum(map(_only_a_query, texts)) / len(texts) if texts else 0.0


def _only_a_query(text: str) -> bool:
    fenced = _FENCE.fullmatch(text.strip())
    body = (fenced["body"] if fenced else text).strip()
    return bool(body) and "```" not in body and re.sub(r"[\s;]+\Z", "", body) == parse(text).sql


def _share(used: float, of: float) -> float:
    """What is left of ``of``, as a share of it."""
    return 1.0 - min(1.0, max(0.0, used / of))


REGISTRY: dict[str, Reward] = {
    "execution_match": execution_match,
    "syntax": syntax,
    "execution_similarity": execution_similarity,
    "schema_linking": schema_linking,
    "efficiency": efficiency,
    "speed": speed,
    "process": process,
    "format": format_,
}
