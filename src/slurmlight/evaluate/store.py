"""Answers on disk: small parquet parts written as answers come, so that a killed evaluation goes on with the open questions.

EVAL/parts/ATTEMPT-NUMBER.parquet, each written atomically and never changed. A (question, sample) is in one part only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError
from slurmlight.files import write_atomic

type Key = tuple[int, int]  # question's place in the data file, sample


@dataclass(frozen=True)
class Answer:
    """One episode and its verdicts: 1, 0, or None where that evaluator has none (then ``unscorable`` says why).

    ``first`` is the query of the first turn; ``outcome`` and ``error`` are strict's kind and error of the final answer.
    ``trace`` is JSON: the turns with node, sql, outcome and message. ``seconds`` is the episode's time.
    """

    index: int
    sample: int
    question: str
    db_id: str
    gold: str
    hardness: str
    answer: str
    first: str
    strict: int | None
    official: int | None
    first_strict: int | None
    first_official: int | None
    outcome: str
    error: str
    reason: str
    vacuous: bool
    unscorable: str
    turns: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    trace: str
    attempt: int

    @property
    def key(self) -> Key:
        return self.index, self.sample


_TYPES = {"int": "int64", "int | None": "int64", "str": "string", "float": "float64", "bool": "bool"}


class Store:
    """The parts of one evaluation. Raises UserError for a part that cannot be read, OSError where none can be written."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self.folder = folder / "parts"
        self.attempt = attempt
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers: dict[Key, Answer] = {one.key: one for one in read_parts(folder)}
        self.waiting: list[Answer] = []
        parts = (path.stem.rpartition("-")[2] for path in self.folder.glob(f"{attempt:03d}-*.parquet"))
        self._number = max((int(number) for number in parts if number.isdecimal()), default=0)  # one may have been removed

    def add(self, answer: Answer) -> None:
        self.answers[answer.key] = answer
        self.waiting.append(answer)

    def flush(self) -> int:
        """Write what waits as a new part; how many answers it holds."""
        if not self.waiting:
            return 0
        part, self.waiting = self.waiting, []
        self._number += 1
        write_table(self.folder / f"{self.attempt:03d}-{self._number:05d}.parquet", part)
        return len(part)


def read_parts(folder: Path) -> list[Answer]:
    """Every answer of the evaluation in ``folder``, in order of question and sample."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: list[Answer] = []
    for path in sorted((folder / "parts").glob("[!.]*.parquet")):
        try:
            found += [Answer(**row) for row in pq.read_table(path).to_pylist()]
        except (OSError, pa.ArrowException, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error})", "remove that part: its questions are asked again") from None
    return sorted(found, key=lambda one: one.key)


def write_table(path: Path, answers: Iterable[Answer]) -> None:
    """``answers`` as one parquet file, atomically. Bytes that are no UTF-8 and lone surrogates become question marks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{name: _utf8(value) for name, value in asdict(one).items()} for one in answers]
    schema = pa.schema([(field.name, pa.type_for_alias(_TYPES[str(field.type)])) for field in fields(Answer)])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())


def _utf8(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
