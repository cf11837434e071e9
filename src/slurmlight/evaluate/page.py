"""A report as one self-contained HTML page. Whatever a model or a data file wrote is escaped; no script can run on it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from slurmlight.evaluate.text import Table, accuracy_tables, facts, headline, loop_table, lost_lines, versus

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.big { font-size: 1.25rem; margin: .3rem 0; }
.partial { background: #fff3cd; padding: .6rem 1rem; border-left: 4px solid #d39e00; }
table { border-collapse: collapse; margin: .8rem 0; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } td { border-bottom: 1px solid #eee; } td.n, th.n { text-align: right; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; flex: 1 1 24rem; }
img { max-width: 100%; height: auto; } td.n, th.n { white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .4rem 0; } .grey { color: #666; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html(summary: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page. ``pictures`` are PNG files by their captions."""
    title = f"Evaluation of {summary['subject']['label']}"
    parts = [f"<h1>{escape(title)}</h1>"]
    if not summary["complete"]:
        parts.append(f"<p class=partial>{escape(_partial(summary))}</p>")
    parts += [f"<p class=big>{escape(line)}</p>" for line in headline(summary)]
    parts.append("<ul class=grey>" + "".join(f"<li>{escape(line)}</li>" for line in facts(summary)) + "</ul>")
    parts.append("<div class=pictures>" + "".join(_picture(name, data) for name, data in pictures.items()) + "</div>")
    for heading, table in [*accuracy_tables(summary), loop_table(summary)]:
        parts += [f"<h2>{escape(heading)}</h2>", _table(table)]
    if "against" in summary:
        parts += _versus(summary["against"])
    parts.append("<h2>What went wrong (strict)</h2>")
    for group in summary["failures"]:
        parts += [f"<p><b>{group['count']} x {escape(group['kind'])}</b></p>", *(_example(one) for one in group["examples"])]
    if summary["lost"]:
        parts.append("<h2>Lost to infrastructure, not counted</h2>")
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lost_lines(summary)) + "</ul>")
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n{"\n".join(parts)}\n</body></html>\n'


def _partial(summary: Mapping[str, Any]) -> str:
    return f"Partial: {summary['answered']} of {summary['asked']} episodes were answered; the figures below are over these."


def _picture(caption: str, data: bytes) -> str:
    return f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'


def _table(table: Table) -> str:
    rows = ["<tr>" + "".join(_cell("th", cell, place) for place, cell in enumerate(table[0])) + "</tr>"]
    rows += ["<tr>" + "".join(_cell("td", cell, place) for place, cell in enumerate(row)) + "</tr>" for row in table[1:]]
    return f"<table>{''.join(rows)}</table>"


def _cell(tag: str, text: str, place: int) -> str:
    return f"<{tag}{' class=n' if place else ''}>{escape(text)}</{tag}>"


def _versus(against: Mapping[str, Any]) -> list[str]:
    parts = [f"<h2>Against {escape(against['label'])}</h2>", *(f"<p>{escape(line)}</p>" for line in versus(against))]
    for side in ("won", "lost"):
        questions: Sequence[Mapping[str, Any]] = against["evaluators"]["strict"][side]
        parts.append(f"<details><summary>{len(questions)} questions {side} (strict)</summary>")
        parts += [_question(one, ("gold", "before", "now")) for one in questions]
        parts.append("</details>")
    return parts


def _example(one: Mapping[str, Any]) -> str:
    return _question(one, ("gold", "answer", "reason"))


def _question(one: Mapping[str, Any], names: Iterable[str]) -> str:
    title = f"{one['index']}: {one['question']} [{one['db_id']}]"
    rows = "".join(f"<tr><td>{name}</td><td><code>{escape(one[name] or '(nothing)')}</code></td></tr>" for name in names)
    return f"<details><summary>{escape(title)}</summary><table>{rows}</table></details>"
