"""How an episode's advantage reaches its calls. Pure numbers: what is compared with what is the engine's business.

The baseline is taken per task over episodes (GRPO's group), never over calls: an episode of five calls counts no more than one
of one call. The advantage A of the episode is then shared out to its K calls:

    all          A for every call
    last         A for the last call; the others do not train
    discounted   gamma^(K - k) A for call k = 1 .. K: reward and baseline are discounted alike, so no call of a better than
                 average episode is ever pushed down for being early
    process      A + w (p_k - mean p) / scale: the process part (weight w in the reward) falls to each call by its own score
                 p_k instead of the mean of all; ``scale`` is what the group's centred rewards were divided by
"""

from __future__ import annotations

from collections.abc import Sequence

from slurmlight.presets.learning import CreditSection


def shares(calls: int, credit: CreditSection) -> list[float]:
    """What each of ``calls`` calls gets of its episode's advantage; 0: it does not train. For ``process`` before the parts."""
    match credit.kind:
        case "last":
            return [0.0] * (calls - 1) + [1.0] * (calls > 0)
        case "discounted":
            return [credit.gamma ** (calls - 1 - place) for place in range(calls)]
    return [1.0] * calls


def of_calls(
    advantage: float, calls: int, credit: CreditSection, parts: Sequence[float] = (), scale: float = 1.0
) -> list[float]:
    """The advantage of each call. ``parts`` are w p_k (process only): where there is none for every call, all are alike."""
    if credit.kind == "process" and len(parts) == calls:
        mean = sum(parts) / max(1, calls)
        return [advantage + (part - mean) / scale for part in parts]
    return [advantage * share for share in shares(calls, credit)]
