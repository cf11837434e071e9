"""A report in words and tables (lists of rows of text), and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurmlight.evaluate.summary import EVALUATORS
from slurmlight.sql.hardness import LEVELS

type Table = list[list[str]]

WON_SHOWN = 20  # questions won or lost in the Markdown; the page and the JSON hold all


def headline(summary: Mapping[str, Any]) -> list[str]:
    """One line an evaluator, and one more for pass@n, which is another measure."""
    lines = []
    for evaluator in EVALUATORS:
        found = summary["evaluators"][evaluator]
        lines.append(f"{summary['measure']}, {evaluator}: {main_figure(summary, found)}")
        if not summary["greedy"]:
            n = summary["samples"]
            passed = _share(found[f"pass@{n}"], found["pass_low"], found["pass_high"])
            lines.append(f"pass@{n} (any of {n} right), {evaluator}: {passed}")
    return lines


def main_figure(summary: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The measure's value with its interval and what it is a share of."""
    if summary["greedy"]:
        return f"{_share(found['accuracy'], found['low'], found['high'])}, {found['right']} of {found['questions']} questions"
    return f"{_share(found[f'mean@{summary["samples"]}'], found['low'], found['high'])}, {found['questions']} questions"


def facts(summary: Mapping[str, Any]) -> list[str]:
    subject = summary["subject"]
    lines = [
        f"questions: {summary['data']} ({subject['questions']}, sha256 {subject['data_sha256']})",
        f"databases: {subject['databases']}",
        f"model: {subject['model']}",
        f"answered: {summary['answered']} of {summary['asked']} episodes in {summary['seconds']} s "
        f"({summary['episodes_per_second'] or 0} a second)",
        f"an episode: median {summary['episode_seconds'].get('median', 0)} s, 95 % within "
        f"{summary['episode_seconds'].get('p95', 0)} s; {summary['tokens']['prompt_mean'] or 0} prompt and "
        f"{summary['tokens']['completion_mean'] or 0} completion tokens",
        f"the evaluators disagree on {sum(summary['disagree'].values())}: {summary['disagree']['official_only']} right for "
        f"official alone, {summary['disagree']['strict_only']} for strict alone",
        f"vacuous matches (empty results on both sides): {summary['evaluators']['strict']['vacuous_matches']} strict, "
        f"{summary['evaluators']['official']['vacuous_matches']} official",
    ]
    if summary["unscorable"]:
        reasons = ", ".join(f"{kind} {count}" for kind, count in summary["unscorable"].items())
        lines.append(f"without a verdict, not counted: {sum(summary['unscorable'].values())} ({reasons})")
    return lines


def accuracy_tables(summary: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """(heading, table) by hardness and by database; first row of a table is its head."""
    found = summary["evaluators"]
    head = ["", *(f"{summary['measure']}, {evaluator}" for evaluator in EVALUATORS)]
    tables = []
    for heading, part, names in (
        ("By hardness", "by_hardness", list(LEVELS)),
        ("By database", "by_database", sorted(found["strict"]["by_database"] | found["official"]["by_database"])),
    ):
        rows = [[name, *(_in_table(summary, found[one][part].get(name)) for one in EVALUATORS)] for name in names]
        tables.append((heading, [head, *rows]))
    return tables


def loop_table(summary: Mapping[str, Any]) -> tuple[str, Table]:
    rows = [["", "first query right", "final answer right", "gained", "spoiled", "episodes"]]
    for evaluator in EVALUATORS:
        loop = summary["evaluators"][evaluator]["loop"]
        rows.append([evaluator, *(str(loop[key]) for key in ("first_right", "final_right", "gained", "spoiled", "episodes"))])
    return "What the check and rewrite loop does", rows


def versus(against: Mapping[str, Any]) -> list[str]:
    return [
        f"{evaluator}: {found['right_before']} right before, {found['right_now']} now, of {found['questions']} questions; "
        f"{len(found['won'])} won, {len(found['lost'])} lost; McNemar's exact test p = {found['p']:.3g}"
        for evaluator, found in against["evaluators"].items()
    ]


def lost_lines(summary: Mapping[str, Any]) -> list[str]:
    shown = [f"question {one['index']}, sample {one['sample']}: {one['why']}" for one in summary["lost_examples"]]
    rest = summary["lost"] - len(shown)
    return shown + ([f"{rest} more, not tried yet or lost as well"] if rest else [])


def markdown(summary: Mapping[str, Any]) -> str:
    """The whole report without pictures."""
    lines = [f"# Evaluation of {summary['subject']['label']}", ""]
    if not summary["complete"]:
        lines += [f"**Partial: {summary['answered']} of {summary['asked']} episodes answered.**", ""]
    lines += [f"* **{line}**" for line in headline(summary)] + [f"* {_plain(line)}" for line in facts(summary)]
    for heading, table in [*accuracy_tables(summary), loop_table(summary)]:
        lines += ["", f"## {heading}", "", *_rows(table)]
    if "against" in summary:
        lines += ["", f"## Against {summary['against']['label']}", "", *(f"* {line}" for line in versus(summary["against"]))]
        for side in ("won", "lost"):
            questions = summary["against"]["evaluators"]["strict"][side]
            lines += [f"* {side}: {one['index']} {_plain(one['question'])} [{one['db_id']}]" for one in questions[:WON_SHOWN]]
    lines += ["", "## What went wrong (strict)", ""]
    for group in summary["failures"]:
        lines.append(f"* {group['count']} x {_plain(group['kind'])}")
        lines += [
            f"    * {one['index']} [{one['db_id']}] {_plain(one['question'])}: `{_code(one['answer'])}`"
            for one in group["examples"]
        ]
    if summary["lost"]:
        lines += ["", "## Lost to infrastructure, not counted", "", *(f"* {_plain(line)}" for line in lost_lines(summary))]
    return "\n".join(lines) + "\n"


def _share(value: float | None, low: float, high: float) -> str:
    return "no question" if value is None else f"{100 * value:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f})"


def _in_table(summary: Mapping[str, Any], found: Mapping[str, Any] | None) -> str:
    return main_figure(summary, found) if found and found["questions"] else ""


def _rows(table: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return [lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]


def _plain(text: str) -> str:
    """One line in which nothing is markup."""
    flat = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in flat)[:600]


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())[:300] or "(nothing)"
