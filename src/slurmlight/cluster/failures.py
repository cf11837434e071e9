"""Log text -> the first cause of a failure and what to do about it; None for a healthy log. Pure.

Only the current attempt counts. Of several known failures the first one is the cause and the others are its consequences,
except that training may have outlived it (it went on by two steps: no cause), and that Slurm reports a lost node or a
process killed for memory only after NCCL or Ray have complained about the missing peer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurmlight.cluster.fingerprints import Rule, literals, table
from slurmlight.cluster.logtext import Attempt, Progress, current_attempt, progress, stamp, without_rank
from slurmlight.cluster.nodelist import NodeListError, expand
from slurmlight.secrets import redact

FIRST_STEP_S = 1800.0
STEP_S = 1200.0
"""Deadlines where the caller knows none: the presets' defaults for job.first_step_s and job.step_s."""
OUTLIVED_STEPS = 2
STALLED_REQUEUES = 3  # rollouts handed out again since the last step, where the log has no times
NEAR_END = 40  # lines: an error further up, with ordinary output after it, was handled
LOGGED_NEAR_END = 5  # a logged one more so
NEAR_SYMPTOM = 100  # lines between an error and what it made another rank, or Slurm, say
MEMORY_FLOOR = 0.4
EVIDENCE_LIMIT = 500

_PORT = tuple(
    re.compile(text, re.IGNORECASE) for text in (r"\('[^']*', (\d+)", r"\bport[:= ]+(\d+)", r"(?:\]|\d|localhost):(\d{4,5})\b")
)
_EXCEPTION = re.compile(r"^(?!INFO|DEBUG|WARN|ERROR|CRITICAL)[A-Za-z_][\w.]*(?:\(\w+\))?(?::\s|:?$)")
_HANDLED = re.compile(r"\b(?:ERROR|WARNING|WARN|INFO|DEBUG|CRITICAL)\b|^Exception ignored in", re.MULTILINE)
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): .")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_REQUEUED = re.compile(r"Requeu(?:e)?ing task (\S+) after timeout", re.IGNORECASE)
_AGAIN = re.compile(r"\(attempt (\d+)\)")
_NODE_LIST = re.compile(r"SLURM_(?:JOB_)?NODELIST\W+([\w.,\[\]-]+)")


@dataclass(frozen=True)
class Finding:
    """``cause`` is the name of the failure, ``detail`` what varies (a port, a node), ``evidence`` the line that shows it,
    ``line`` its number in the text from 1. ``requeue``: whether coming back can help. ``adjust``: preset keys to change by
    that much for the next attempt (see ``adjusted``)."""

    cause: str
    evidence: str
    action: str
    requeue: bool = True
    detail: str = ""
    line: int = 0
    attempt: int | None = None
    adjust: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.cause} ({self.detail})" if self.detail else self.cause


@dataclass(frozen=True)
class _Hit:
    line: int
    rule: Rule
    match: re.Match[str]


def diagnose(
    text: str, *, nodes: Sequence[str] = (), first_step_s: float = FIRST_STEP_S, step_s: float = STEP_S
) -> Finding | None:
    """The first cause in the current attempt of ``text``; None where nothing is wrong.

    ``nodes`` are the job's, to name those that a Ray cluster lacks; ``first_step_s`` and ``step_s`` are the deadlines of the
    first and of later steps (s), for logs that show nothing but waiting.
    """
    attempt = current_attempt(text)
    steps = progress(attempt.lines)
    hits = [hit for hit in _hits(attempt.lines) if hit.rule.kind == "slurm" or not _outlived(hit.line, steps)]
    strong = [hit for hit in hits if hit.rule.kind in ("cause", "slurm", "late")]
    raised = _raised(attempt.lines, steps)
    if strong:
        first = min(strong, key=lambda hit: hit.line)
        late = [hit for hit in strong if hit.rule.kind == "late"]
        if first.rule.symptom and late:
            first = late[0]
        elif first.rule.symptom and raised and raised.hard and 0 < first.line - raised.end <= NEAR_SYMPTOM:
            return _application(raised, attempt)
        return _finding(first, attempt, nodes)
    if stalled := _stalled(attempt, steps, first_step_s, step_s):
        return stalled
    errors = [hit for hit in hits if hit.rule.kind == "error"]
    ends = [hit for hit in hits if hit.rule.kind == "end"]
    if raised and (ends or raised.near_end) and not any(hit.line < raised.line for hit in errors):
        return _application(raised, attempt)
    if not (found := errors or ends):
        return None
    first = min(found, key=lambda hit: hit.line)
    finding = _finding(first, attempt, nodes)
    return finding if errors else replace(finding, evidence=_error_line(attempt.lines, first.line) or finding.evidence)


def masked(finding: Finding) -> Finding:
    """``finding`` without the secrets that its line may hold (those of this process's environment, and what looks like one)."""
    return replace(finding, evidence=redact(finding.evidence), action=redact(finding.action), detail=redact(finding.detail))


def adjusted(value: float, change: float) -> float:
    """A share of GPU memory for the next attempt: ``value`` + ``change``, not below MEMORY_FLOOR."""
    return max(MEMORY_FLOOR, round(value + change, 4))


def _hits(lines: Sequence[str]) -> list[_Hit]:
    """Every line that a rule knows, with the first rule that does."""
    rules, words = table(), literals()
    found: list[_Hit] = []
    for at, line in enumerate(lines):
        lowered = line.lower()
        for word in words:  # a plain loop: this is where the time goes in a long log
            if word in lowered:
                found += next(([_Hit(at, rule, match)] for rule in rules if (match := rule.search(line, lowered))), [])
                break
    return found


def _outlived(line: int, steps: Sequence[Progress]) -> bool:
    before = max((step.done for step in steps if step.line < line), default=0)
    return any(step.done >= before + OUTLIVED_STEPS for step in steps if step.line > line)


def _finding(hit: _Hit, attempt: Attempt, nodes: Sequence[str]) -> Finding:
    line = attempt.lines[hit.line]
    values = {name: value or "" for name, value in hit.match.groupdict().items()}
    if "{port}" in hit.rule.detail and not values.get("port"):
        values["port"] = next((match[1] for pattern in _PORT if (match := pattern.search(line))), "")
    needed = re.findall(r"\{(\w+)\}", hit.rule.detail)
    detail = hit.rule.detail.format(**values) if all(values.get(name) for name in needed) else ""
    action = hit.rule.action.format(**values)
    if "GPUs" in hit.rule.cause and (absent := _absent(attempt.lines, nodes)):
        action = f"not in the Ray cluster: {', '.join(absent)}; {action}"
    return _build(hit.rule, attempt, hit.line, line, detail, action)


def _build(rule: Rule, attempt: Attempt, at: int, line: str, detail: str, action: str) -> Finding:
    return Finding(
        cause=rule.cause,
        evidence=line.strip()[:EVIDENCE_LIMIT],
        action=action,
        requeue=rule.requeue,
        detail=detail,
        line=attempt.first + at,
        attempt=attempt.number,
        adjust=rule.adjust,
    )


def _error_line(lines: Sequence[str], end: int) -> str:
    """The last line before ``end`` that looks like an exception's, where its traceback is missing; "" for none."""
    texts = (without_rank(line)[1].strip() for line in reversed(lines[max(0, end - NEAR_END) : end]))
    return next((text[:EVIDENCE_LIMIT] for text in texts if _ERROR_LINE.match(text)), "")


def _absent(lines: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Nodes of the job that no line names but the node list itself."""
    known = list(nodes)
    for line in lines:
        if not known and (match := _NODE_LIST.search(line)):
            try:
                known = list(expand(match[1]))
            except NodeListError:
                continue
    rest = "\n".join(line for line in lines if not _NODE_LIST.search(line)) if known else ""
    return [node for node in known if not re.search(rf"(?<![\w-]){re.escape(node)}(?![\w-])", rest)]


# errors that no rule knows


@dataclass(frozen=True)
class _Raised:
    """A Python traceback: where it starts, its last line. ``hard``: nobody logged it, so nobody caught it."""

    line: int
    end: int
    text: str
    hard: bool
    near_end: bool


def _raised(lines: Sequence[str], steps: Sequence[Progress]) -> _Raised | None:
    """The first traceback that training did not outlive; one that nobody caught before one that was logged."""
    found = [one for one in _tracebacks(lines) if not _outlived(one.end, steps)]
    return next((one for one in found if one.hard), found[0] if found else None)


def _tracebacks(lines: Sequence[str]) -> Iterator[_Raised]:
    at = 0
    last = max((n for n, line in enumerate(lines) if line.strip()), default=0)
    while at < len(lines):
        if "Traceback (most recent call last)" not in lines[at]:
            at += 1
            continue
        end = _last_line(lines, at)
        text = without_rank(lines[end])[1].strip()
        before = lines[at][: lines[at].index("Traceback")] + "\n" + (lines[at - 1] if at else "")
        if text and not text.startswith("Traceback") and "Exception ignored in" not in before:
            hard = not _HANDLED.search(before)
            yield _Raised(at, end, text, hard, last - end <= (NEAR_END if hard else LOGGED_NEAR_END))
        at = end + 1


def _last_line(lines: Sequence[str], start: int) -> int:
    """The line with the exception at the end of the traceback that begins at ``start``, its chain followed to the end."""
    who = without_rank(lines[start])[0]
    found, open_ = start, True
    for at in range(start + 1, min(start + 2000, len(lines))):
        rank, text = without_rank(lines[at])
        if rank != who or not text.strip():
            continue  # another rank's line in between
        if text.startswith(_CHAINED) or text.startswith("Traceback (most recent call last)"):
            open_ = True
        elif open_ and not text[0].isspace() and text[0] not in "|+" and _EXCEPTION.match(text):
            found, open_ = at, text.startswith("ray.exceptions.RayTaskError")
        elif not open_ and not text[0].isspace():
            break  # the exception's message may go on over indented lines; anything else is new output
    return found


def _application(raised: _Raised, attempt: Attempt) -> Finding:
    cause = "interrupted" if raised.text.startswith("KeyboardInterrupt") else "application error"
    return Finding(
        cause=cause,
        evidence=raised.text[:EVIDENCE_LIMIT],
        action="read the traceback that ends in this line and mend its cause; a requeue helps only against a passing fault",
        line=attempt.first + raised.end,
        attempt=attempt.number,
    )


# logs that show nothing but waiting


def _stalled(attempt: Attempt, steps: Sequence[Progress], first_step_s: float, step_s: float) -> Finding | None:
    lines = attempt.lines
    last = steps[-1] if steps else None
    after = last.line if last else -1
    requeued = [at for at in range(after + 1, len(lines)) if _REQUEUED.search(lines[at])]
    if requeued and _waits(lines, after, requeued, step_s):
        rate = _per_minute(lines, requeued)
        action = "look at the runners and at the rollout server; stacks are saved and the job requeues under the cap"
        return Finding(
            "rollouts stall", lines[requeued[-1]].strip()[:EVIDENCE_LIMIT], action, True, rate, attempt.first + requeued[-1],
            attempt.number,
        )  # fmt: skip
    if last and not any(step.done for step in steps) and last.elapsed is not None and last.elapsed > first_step_s:
        action = "see what the rollouts wait for (server up? runners alive?); raise job.first_step_s if loading is just slow"
        detail = f"{last.elapsed:.0f} s > {first_step_s:.0f} s"
        return Finding(
            "no first step", lines[last.line].strip()[-EVIDENCE_LIMIT:], action, True, detail, attempt.first + last.line,
            attempt.number,
        )  # fmt: skip
    return None


def _waits(lines: Sequence[str], after: int, requeued: Sequence[int], step_s: float) -> bool:
    """Whether the last step is older than the step deadline: by the lines' times, else by how often rollouts came back."""
    begin = next((when for line in lines[max(after, 0) : requeued[-1]] if (when := stamp(line)) is not None), None)
    end = stamp(lines[requeued[-1]])
    if begin is not None and end is not None and end > begin:
        return end - begin > step_s
    again = any(int(match[1]) > 1 for at in requeued if (match := _AGAIN.search(lines[at])))
    return again or len(requeued) >= STALLED_REQUEUES


def _per_minute(lines: Sequence[str], requeued: Sequence[int]) -> str:
    times = [when for at in requeued if (when := stamp(lines[at])) is not None]
    count = f"{len(requeued)} rollouts handed out again since the last step"
    if len(times) < 2 or times[-1] <= times[0]:
        return count
    return f"{count}, {len(times) * 60 / (times[-1] - times[0]):.1f} a minute"
