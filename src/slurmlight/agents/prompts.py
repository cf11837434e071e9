"""What the SQL agent says to the model: every part has a token budget, so that a prompt stays under its limit by construction.

A conversation is the question alone, or the question, the last query and what came of it. Older attempts are not shown:
their share of the budget is spent on telling more of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurmlight.agents.contract import InfrastructureError, SqlTask
from slurmlight.sql.budget import estimate
from slurmlight.sql.execute import Result
from slurmlight.sql.schema import SchemaError, compact_text, read_schema, schema_text

Message = dict[str, str]

FENCED = "Answer with one SQLite query in a ```sql block and nothing else."
WRITE = f"You translate questions into SQLite queries. Use only the tables and columns of the given schema. {FENCED}"
CHECK = (
    "You review a SQLite query that was written for a question. Look at the schema, the query and what it returned, and say "
    "briefly what is wrong, if anything: columns that were not asked for, wrong filters, joins, grouping, order or limit. "
    "End with a line that says THE QUERY IS CORRECT or THE QUERY IS INCORRECT."
)
FRAME_TOKENS = 256  # instructions, headings and the chat template's own tokens
COMPACT_ERROR_CHARS = 60
RESULT_ROWS = 10
CELL_CHARS = 60


@dataclass(frozen=True)
class Prompts:
    """``compact`` is the tiny policy's way (it was warm-started on exactly this text): names of tables and columns, the
    question, bare SQL. Otherwise for instruction-tuned models. ``max_tokens`` bounds every prompt, by estimate."""

    compact: bool = False
    max_tokens: int = 4096

    @property
    def part_tokens(self) -> int:
        """For each of: the last query, what executing it gave, a review of it."""
        return min(512, self.max_tokens // 8)

    def context(self, task: SqlTask) -> str:
        """Schema and question. Raises InfrastructureError where no schema can be shown."""
        try:
            schema = read_schema(task.database)
            if self.compact:
                return f"{compact_text(schema)}\n{task.question}"
            budget = self.max_tokens - 3 * self.part_tokens - FRAME_TOKENS - estimate(task.question)
            return f"Schema:\n{schema_text(schema, budget, task.question)}\n\nQuestion: {task.question}"
        except SchemaError as error:
            raise InfrastructureError(f"task {task.task_id}: {error}") from None

    def write(self, context: str) -> list[Message]:
        user = {"role": "user", "content": context}
        return [user] if self.compact else [{"role": "system", "content": WRITE}, user]

    def rewrite(self, context: str, sql: str, feedback: str) -> list[Message]:
        """The conversation after a query that did not do; ``sql`` may be "" where there was none."""
        answer = sql if self.compact else f"```sql\n{cut(sql, self.part_tokens)}\n```" if sql else "(no query)"
        then = feedback if self.compact else f"{feedback}\n\nWrite a better query. {FENCED}"
        return [*self.write(context), {"role": "assistant", "content": answer}, {"role": "user", "content": then}]

    def check(self, context: str, sql: str, told: str) -> list[Message]:
        text = f"{context}\n\nQuery:\n{cut(sql, self.part_tokens)}\n\n{told}"
        return [{"role": "system", "content": CHECK}, {"role": "user", "content": text}]

    def tell(self, result: Result) -> str:
        """What executing a query gave: the error, or columns, row count and the first rows."""
        if result.kind != "rows":
            message = " ".join((result.message or result.kind).split())
            if self.compact:
                return f"Error: {message[:COMPACT_ERROR_CHARS]}"
            return cut(f"The query failed ({result.kind}): {message}", self.part_tokens)
        if self.compact:
            return "The result is empty." if not result.rows else f"{len(result.rows)} rows."
        count = len(result.rows)
        lines = [f"The query returned {count} row{'s' * (count != 1)}. Columns: {', '.join(result.columns)}"]
        lines += [" | ".join(_cell(value) for value in row) for row in result.rows[:RESULT_ROWS]]
        if count > RESULT_ROWS:
            lines.append("...")
        return cut("\n".join(lines), self.part_tokens)

    def tell_no_query(self, failure: str) -> str:
        return "Error: no query" if self.compact else f"There was no query to run: {failure}."

    def tell_review(self, told: str, review: str) -> str:
        """The result together with what the check found wrong with it (its end, where the verdict's reasons stand)."""
        return f"{told}\n\nA reviewer says: {cut(review, self.part_tokens)}"


def cut(text: str, tokens: int) -> str:
    """``text`` where it fits, else its beginning and a mark."""
    if len(text) <= 4 * tokens and estimate(text) <= tokens:  # the estimate is never below a quarter of the length
        return text
    text = text[: 4 * tokens]
    while estimate(text) > tokens - 1:
        text = text[: len(text) * 7 // 8]
    return text + " ..."


def _cell(value: object) -> str:
    if value is None:
        return "NULL"
    text = repr(value) if isinstance(value, float | bytes) else str(value)
    text = " ".join(text[: 4 * CELL_CHARS].encode("utf-8", "replace").decode().split())
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + "..."
