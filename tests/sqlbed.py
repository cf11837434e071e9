"""A small database of their own for the SQL tests: duplicates, ties, NULLs, bad bytes, floats, 0/1 columns, nothing."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

SCHEMA = """
CREATE TABLE emp(id INTEGER PRIMARY KEY, name TEXT, dept TEXT, age INT, salary REAL);
INSERT INTO emp VALUES (1,'Ann','A',30,10.5),(2,'Bob','A',40,NULL),(3,'Cid','B',40,9.0),(4,'Dee','B',50,9.0),(5,'Ann','C',25,1.0);
CREATE TABLE num(a INT, x REAL, y REAL);
INSERT INTO num VALUES (1,0.1,0.2),(2,0.3,0.1),(3,0.1,0.3);
CREATE TABLE person(id INT, last TEXT, raw BLOB);
INSERT INTO person VALUES (1,'Muoz',x'00ff'),(2,CAST(x'4d75f16f7a' AS TEXT),NULL),(3,'caf\u00e9',NULL),(4,'NULL',NULL),(5,NULL,NULL);
CREATE TABLE empty_t(a, b);
"""


def build(path: Path) -> Path:
    """Write the database and return its path."""
    connection = sqlite3.connect(path)
    connection.executescript(SCHEMA)
    connection.commit()
    connection.close()
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
