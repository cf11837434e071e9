"""What the SQL agent says to the model: every part has a token budget, so that a prompt stays under its limit by construction.

``full`` is for instruction-tuned models, ``compact`` for the tiny policy (which was warm-started on exactly this text).
A conversation is: question; or question, the last query, what came of it. Older attempts are not shown: the budget of one is
spent on telling more of it.
"""

from __future__ import annotations

from slurmlight.agents.contract import InfrastructureError, SqlTask
from slurmlight.sql.execute import Result
from slurmlight.sql.schema import SchemaError, compact_text, read_schema, schema_text
from slurmlight.sql.tokens import estimate

Message = dict[str, str]

FENCED = "Answer with one SQLite query in a ```sql block and nothing else."
WRITE = f"You translate questions into SQLite queries. Use only the tables and columns of the given schema. {FENCED}"
CHECK = (
    "You review a SQLite query that was written for a question. Look at the schema, the query and what it returned, and say "
    "briefly what is wrong, if anything: columns that were not asked for, wrong filters, joins, grouping, order or limit. "
    "End with a line that says THE QUERY IS CORRECT or THE QUERY IS INCORRECT."
)
QUERY_TOKENS = 512  # of the last query, when it is shown again
RESULT_TOKENS = 512  # of what executing it gave
REVIEW_TOKENS = 256  # of what the check said
FRAME_TOKENS = 160  # instructions, headings and the chat template's own tokens around up to four messages
COMPACT_ERROR_CHARS = 60
RESULT_ROWS = 10
CELL_CHARS = 60


def context(task: SqlTask, compact: bool, max_prompt_tokens: int) -> str:
    """Schema and question: the first user message. Raises InfrastructureError where no schema can be shown."""
    try:
        schema = read_schema(task.database)
        if compact:
            return f"{compact_text(schema)}\n{task.question}"
        later = QUERY_TOKENS + RESULT_TOKENS + REVIEW_TOKENS
        budget = max_prompt_tokens - later - FRAME_TOKENS - estimate(task.question)
        return f"Schema:\n{schema_text(schema, budget, task.question)}\n\nQuestion: {task.question}"
    except SchemaError as error:
        raise InfrastructureError(f"task {task.task_id}: {error}") from None


def write(context_text: str, compact: bool) -> list[Message]:
    if compact:
        return [{"role": "user", "content": context_text}]
    return [{"role": "system", "content": WRITE}, {"role": "user", "content": context_text}]


def rewrite(context_text: str, sql: str, feedback: str, compact: bool) -> list[Message]:
    """The conversation after a query that did not do. ``feedback`` is of ``tell`` or of a review."""
    if compact:
        return [*write(context_text, True), {"role": "assistant", "content": sql}, {"role": "user", "content": feedback}]
    shown = f"```sql\n{cut(sql, QUERY_TOKENS)}\n```" if sql else "(no query)"
    return [
        *write(context_text, False),
        {"role": "assistant", "content": shown},
        {"role": "user", "content": f"{feedback}\n\nWrite a better query. {FENCED}"},
    ]


def check(context_text: str, sql: str, outcome: str) -> list[Message]:
    text = f"{context_text}\n\nQuery:\n{cut(sql, QUERY_TOKENS)}\n\n{outcome}"
    return [{"role": "system", "content": CHECK}, {"role": "user", "content": text}]


def tell(result: Result, compact: bool) -> str:
    """What executing a query gave, as the model is told: the error, or columns, row count and the first rows."""
    if result.kind != "rows":
        message = " ".join((result.message or result.kind).split())
        if compact:
            return f"Error: {message[:COMPACT_ERROR_CHARS]}"
        return cut(f"The query failed ({result.kind}): {message}", RESULT_TOKENS)
    if compact:
        return "The result is empty."
    columns = ", ".join(result.columns)
    count = len(result.rows)
    lines = [f"The query returned {count} row{'s' * (count != 1)}. Columns: {columns}"]
    lines += [" | ".join(_cell(value) for value in row) for row in result.rows[:RESULT_ROWS]]
    if count > RESULT_ROWS:
        lines.append("...")
    return cut("\n".join(lines), RESULT_TOKENS)


def tell_no_query(failure: str, compact: bool) -> str:
    return "Error: no query" if compact else f"There was no query to run: {failure}."


def cut(text: str, tokens: int) -> str:
    """``text`` where it fits, else its beginning with a mark; the estimate is an upper bound, so halving steps suffice."""
    if estimate(text) <= tokens:
        return text
    while estimate(text) > tokens - 4:
        text = text[: len(text) * 7 // 8]
    return text + " ..."


def _cell(value: object) -> str:
    if value is None:
        return "NULL"
    text = repr(value) if isinstance(value, float | bytes) else str(value)
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + "..."
