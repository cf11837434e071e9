"""The rewards there are, by name: range, meaning, source. Names only, so that a preset can be checked at launch.

Sources: [kit] own choice; [execution] execution match as in Yu et al. 2018 (arXiv 1809.08887) and Zhong et al. 2020
(arXiv 2010.02840); [partial] the partial rewards of Reasoning-SQL (arXiv 2503.23157), where syntax and schema linking are such
parts too. The formulas are this kit's, in parts.py and overlap.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """``lowest`` to 1 is what the reward can be. ``varies``: the same episode played again may earn another value."""

    meaning: str
    source: str
    lowest: float = 0.0
    varies: bool = False


REWARDS: dict[str, About] = {
    "execution_match": About("1: the answer returns what the gold query returns on every instance, else 0", "execution"),
    "syntax": About("1: SQLite can parse the answer as one query, whatever names it uses, else 0", "partial"),
    "execution_similarity": About("overlap of the two results: 1 for a match, at most 0.9 otherwise", "kit"),
    "schema_linking": About("tables and columns named by both queries, of those named by either", "partial"),
    "efficiency": About("mean of turns not needed and tokens not needed, as shares of their limits", "kit"),
    "speed": About("1 - seconds / runner.rollout_timeout_s", "kit", varies=True),
    "process": About("mean over the calls: a query that ran, a fix that is new, a check that asked for one", "kit"),
    "format": About("share of the write and rewrite calls that gave one query and nothing else", "partial"),
}
USER_LOWEST, HIGHEST = -1.0, 1.0  # what a reward of one's own may return
