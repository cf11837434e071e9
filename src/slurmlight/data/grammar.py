"""Question families over a toy domain: each draw gives a question, its gold SQL and the family's name."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from slurmlight.data.domains import Domain


@dataclass(frozen=True)
class Question:
    question: str
    query: str
    db_id: str
    family: str


@dataclass(frozen=True)
class Family:
    """Paraphrases and the gold, both with the slots of ``_slots``; ``weight`` is its share in every split."""

    name: str
    weight: float
    questions: tuple[str, ...]
    query: str


FAMILIES = (
    Family(
        "list",
        1.0,
        ("List the {col} of all {t}.", "Show the {col} of every {s}.", "What are the {col} values of the {t}?"),
        "SELECT {col} FROM {t}",
    ),
    Family(
        "two",
        1.0,
        ("List the {n} and {o} of all {t}.", "Show the {n} and the {o} of every {s}.", "Give the {n} and {o} for each {s}."),
        "SELECT {n}, {o} FROM {t}",
    ),
    Family(
        "where",
        2.0,
        ("List the {n} of {t} with {i} {cmp} {k}.", "Which {t} have a {i} {cmp} {k}? Show the {n}."),
        "SELECT {n} FROM {t} WHERE {i} {op} {k}",
    ),
    Family(
        "where-text",
        1.0,
        ("List the {o2} of {t} whose {c} is {v}.", "Which {t} have {c} {v}? Show the {o2}.", "Show the {o2} of {c} {v} {t}."),
        "SELECT {o2} FROM {t} WHERE {c} = '{v}'",
    ),
    Family(
        "where-both",
        2.0,
        (
            "List the {n} of {t} whose {c} is {v} {andor} whose {i} is {cmp} {k}.",
            "Which {t} have {c} {v} {andor} a {i} {cmp} {k}? Show the {n}.",
        ),
        "SELECT {n} FROM {t} WHERE {c} = '{v}' {bool} {i} {op} {k}",
    ),
    Family(
        "count",
        0.5,
        ("How many {a} are there?", "Count the {a}.", "What is the number of {a}?", "Give the number of all {a}."),
        "SELECT COUNT(*) FROM {a}",
    ),
    Family(
        "count-where",
        2.0,
        ("How many {a} have a {ai} {cmp} {ak}?", "Count the {a} with {ai} {cmp} {ak}."),
        "SELECT COUNT(*) FROM {a} WHERE {ai} {op} {ak}",
    ),
    Family(
        "agg",
        1.0,
        ("What is the {stat} {ai} of all {a}?", "Show the {stat} {ai} of the {a}.", "Find the {stat} {ai} over all {a}."),
        "SELECT {fn}({ai}) FROM {a}",
    ),
    Family(
        "agg-where",
        2.0,
        ("What is the {stat} {i} of {t} whose {c} is {v}?", "Show the {stat} {i} of {t} with {c} {v}."),
        "SELECT {fn}({i}) FROM {t} WHERE {c} = '{v}'",
    ),
    Family(
        "distinct",
        1.0,
        (
            "List the different {c} values of the {t}.",
            "Which different {c} values do the {t} have?",
            "Show every {c} of the {t} only once.",
            "What are the unique {c} values among {t}?",
        ),
        "SELECT DISTINCT {c} FROM {t}",
    ),
    Family(
        "order",
        1.0,
        ("List the {n} of all {t} by {i} in {dir} order.", "Show the {n} of {t} sorted by {dir} {i}."),
        "SELECT {n} FROM {t} ORDER BY {i} {sort}",
    ),
    Family(
        "top",
        2.0,
        ("Show the {n} of the {m} {t} with the {most} {i}.", "Which {m} {t} have the {most} {i}? Give the {n}."),
        "SELECT {n} FROM {t} ORDER BY {i} {rank} LIMIT {m}",
    ),
    Family(
        "group",
        1.0,
        (
            "How many {t} are there for each {c}?",
            "Show each {c} and its number of {t}.",
            "For every {c}, count the {t}.",
            "Count the {t} per {c}.",
        ),
        "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}",
    ),
    Family(
        "group-agg",
        1.5,
        ("What is the {stat} {i} of {t} for each {c}?", "For every {c}, show the {stat} {i} of the {t}."),
        "SELECT {c}, {fn}({i}) FROM {t} GROUP BY {c}",
    ),
    Family(
        "having",
        1.0,
        ("Which {c} values have {cmp} {h} {t}?", "List each {c} with {cmp} {h} {t}."),
        "SELECT {c} FROM {t} GROUP BY {c} HAVING COUNT(*) {op} {h}",
    ),
    Family(
        "join-where",
        1.5,
        ("Show the {li} of {l} whose {s} has {c} {v}.", "List the {li} of all {l} by {t} with {c} {v}."),
        "SELECT {li} FROM {l} JOIN {t} ON {fk} = {t}.id WHERE {c} = '{v}'",
    ),
    Family(
        "join-group",
        1.0,
        (
            "How many {l} does each {s} have? Show the {n}.",
            "Show the {n} of each {s} and its number of {l}.",
            "For every {s}, give the {n} and count the {l}.",
        ),
        "SELECT {n}, COUNT(*) FROM {l} JOIN {t} ON {fk} = {t}.id GROUP BY {fk}",
    ),
    Family(
        "subquery",
        1.0,
        ("List the {o2} of {t} with {i} {side} the average.", "Which {t} have a {i} {side} average? Show the {o2}."),
        "SELECT {o2} FROM {t} WHERE {i} {than} (SELECT AVG({i}) FROM {t})",
    ),
)

COMPARISONS = (("at least", ">="), ("at most", "<="), ("above", ">"), ("below", "<"))
STATISTICS = (("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN"))

Numbers = Mapping[str, list[int]]  # table name -> values of its number column in the first instance


def draw(family: Family, domain: Domain, numbers: Numbers, rng: random.Random) -> Question:
    slots = _slots(domain, numbers, rng)
    return Question(rng.choice(family.questions).format(**slots), family.query.format(**slots), domain.name, family.name)


def _slots(domain: Domain, numbers: Numbers, rng: random.Random) -> dict[str, object]:
    """One value for every slot. Thresholds are values that occur, so that > and >= differ."""
    base, link = rng.choice(domain.bases), domain.link
    any_table = rng.choice((*domain.bases, link))
    (cmp, op), (stat, fn) = rng.choice(COMPARISONS), rng.choice(STATISTICS)
    andor = rng.choice(("and", "or"))
    direction, most, side = rng.randrange(2), rng.randrange(2), rng.randrange(2)
    return {
        "t": base.name,
        "s": base.singular,
        "n": base.label,
        "c": base.category,
        "i": base.number,
        "v": rng.choice(base.categories.split()),
        "k": rng.choice(numbers[base.name]),
        "o": rng.choice((base.category, base.number)),
        "o2": rng.choice((base.label, base.number)),
        "col": rng.choice((base.label, base.category, base.number)),
        "a": any_table.name,
        "ai": any_table.number,
        "ak": rng.choice(numbers[any_table.name]),
        "l": link.name,
        "li": link.number,
        "fk": domain.key(base),
        "cmp": cmp,
        "op": op,
        "stat": stat,
        "fn": fn,
        "andor": andor,
        "bool": andor.upper(),
        "dir": ("ascending", "descending")[direction],
        "sort": ("ASC", "DESC")[direction],
        "most": ("lowest", "highest")[most],
        "rank": ("ASC", "DESC")[most],
        "side": ("below", "above")[side],
        "than": ("<", ">")[side],
        "m": rng.randint(2, 8),
        "h": rng.randint(2, 8),
    }
