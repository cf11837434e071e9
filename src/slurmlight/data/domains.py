"""The toy databases: five small worlds of two base tables and one table that links them, filled from a seed."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path

BASE_ROWS = 24
LINK_ROWS = 40

PEOPLE = (
    "Ada Ben Cleo Dora Emil Finn Gwen Hugo Iris Jack Kira Liam Mona Nils Olga Paul Quin Rosa Sven Tara Ugo Vera Wanda Xena "
    "Yuri Zoe Amir Bella Carl Dina Erik Fay Gus Hana Ivan Jana"
)


@dataclass(frozen=True)
class Table:
    """Columns are id, ``label``, ``category``, ``number``; a link table has id, two foreign keys, ``number`` instead.

    ``numbers`` is the half-open range of the number column; its values are unique within the table, so that no LIMIT
    ever cuts through a tie.
    """

    name: str
    singular: str
    number: str
    numbers: tuple[int, int]
    label: str = ""
    labels: str = ""
    category: str = ""
    categories: str = ""


@dataclass(frozen=True)
class Domain:
    name: str
    bases: tuple[Table, Table]
    link: Table

    def key(self, base: Table) -> str:
        """The link table's foreign key to ``base``."""
        return f"{base.singular}_id"


DOMAINS = (
    Domain(
        "shop",
        (
            Table("customers", "customer", "age", (18, 90), "name", PEOPLE, "city", "Paris Rome Oslo Cairo Lima"),
            Table(
                "products",
                "product",
                "price",
                (10, 99),
                "name",
                "lamp desk chair bowl tent sofa knife clock radio piano phone shelf mirror carpet bottle basket ladder hammer "
                "pillow candle drum flute kettle plate spoon towel",
                "category",
                "toys food tools music garden",
            ),
        ),
        Table("orders", "order", "quantity", (10, 99)),
    ),
    Domain(
        "school",
        (
            Table("students", "student", "score", (20, 99), "name", PEOPLE, "major", "law art math biology history"),
            Table(
                "courses",
                "course",
                "credits",
                (10, 60),
                "title",
                "logic poetry optics ethics algebra drawing ecology grammar rhetoric geology botany acoustics statistics "
                "mechanics anatomy sculpture debate genetics calculus painting philosophy topology zoology theatre ceramics",
                "level",
                "basic middle advanced master",
            ),
        ),
        Table("enrollments", "enrollment", "grade", (20, 99)),
    ),
    Domain(
        "clinic",
        (
            Table("doctors", "doctor", "salary", (20, 99), "name", PEOPLE, "specialty", "heart skin bone eye lung"),
            Table("patients", "patient", "weight", (40, 99), "name", PEOPLE, "town", "Bern Graz Lyon Turin Ghent"),
        ),
        Table("visits", "visit", "cost", (10, 99)),
    ),
    Domain(
        "airline",
        (
            Table("pilots", "pilot", "hours", (10, 99), "name", PEOPLE, "rank", "captain officer cadet trainer"),
            Table(
                "planes",
                "plane",
                "seats",
                (10, 99),
                "model",
                "falcon condor heron swift eagle osprey raven kite hawk merlin stork crane egret ibis gull tern swan owl wren "
                "finch robin lark martin plover dove",
                "maker",
                "Boeing Airbus Cessna Antonov",
            ),
        ),
        Table("flights", "flight", "distance", (10, 99)),
    ),
    Domain(
        "library",
        (
            Table("readers", "reader", "points", (10, 99), "name", PEOPLE, "district", "north south east west"),
            Table(
                "books",
                "book",
                "pages",
                (10, 99),
                "title",
                "Dawn Ember Frost Grove Haven Island Jungle Kingdom Legend Meadow Nebula Oasis Prism Quest River Shadow Tundra "
                "Umbra Valley Willow Xylem Yonder Zenith Anchor Beacon",
                "genre",
                "crime fantasy drama travel",
            ),
        ),
        Table("loans", "loan", "days", (10, 99)),
    ),
)

UNSEEN = ("library",)  # never in train, val or test


def fill(domain: Domain, path: Path, seed: str) -> None:
    """Write ``domain`` with rows drawn from ``seed`` into a new SQLite file at ``path`` (same seed, same bytes)."""
    rng = random.Random(seed)
    connection = sqlite3.connect(path)
    try:
        for base in domain.bases:
            connection.execute(
                f"CREATE TABLE {base.name} (id INTEGER PRIMARY KEY, {base.label} TEXT, {base.category} TEXT, "
                f"{base.number} INTEGER)"
            )
            labels = rng.sample(base.labels.split(), BASE_ROWS)
            numbers = rng.sample(range(*base.numbers), BASE_ROWS)
            categories = base.categories.split()
            rows = [(n + 1, labels[n], rng.choice(categories), numbers[n]) for n in range(BASE_ROWS)]
            connection.executemany(f"INSERT INTO {base.name} VALUES (?, ?, ?, ?)", rows)
        link = domain.link
        keys = [domain.key(base) for base in domain.bases]
        references = ", ".join(
            f"{key} INTEGER REFERENCES {base.name}(id)" for key, base in zip(keys, domain.bases, strict=True)
        )
        connection.execute(f"CREATE TABLE {link.name} (id INTEGER PRIMARY KEY, {references}, {link.number} INTEGER)")
        numbers = rng.sample(range(*link.numbers), LINK_ROWS)
        links = [(n + 1, rng.randint(1, BASE_ROWS), rng.randint(1, BASE_ROWS), numbers[n]) for n in range(LINK_ROWS)]
        connection.executemany(f"INSERT INTO {link.name} VALUES (?, ?, ?, ?)", links)
        connection.commit()
    finally:
        connection.close()
