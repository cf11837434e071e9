"""Scores and answers before and after training, kept across attempts, and shown once at the end.

RUN/start.json holds what was scored before the first step; a resumed run takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from slurmlight.files import read_json, write_json
from slurmlight.runfolder import RunFolder
from slurmlight.tracking.summary import Example, Score, Stage, end_view, pick_examples, write_report
from slurmlight.tracking.tracker import Tracker
from slurmlight.train.embedded.exam import Exam

_SPLITS = ("test", "unseen")  # nobody trains or tunes on them


class Results:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.path = folder.path / "start.json"
        self.before: list[dict] = []
        self.after: Exam | None = None
        self.scores: list[Score] = []
        kept = read_json(self.path)
        if isinstance(kept, dict):
            self.scores = [Score(**one) for one in kept["scores"]]
            self.before = kept["answers"]

    def splits(self, given: Iterable[str]) -> list[str]:
        """The splits to score, of those that were ``given``."""
        return [split for split in _SPLITS if split in given]

    def add(self, split: str, stage: Stage, exam: Exam) -> None:
        self.scores = [one for one in self.scores if (one.split, one.stage) != (split, stage)]
        self.scores.append(Score(split, stage, round(exam.right), exam.questions))
        if split == "test" and stage == "start":
            self.before = [asdict(one) for one in exam.answers]
        if split == "test" and stage == "after":
            self.after = exam

    def keep(self) -> None:
        """Raises OSError."""
        write_json(self.path, {"scores": [asdict(one) for one in self.scores], "answers": self.before})

    def show(self, tracker: Tracker) -> None:
        """Write RUN/report and print the table, the curve and three questions. Raises OSError."""
        examples = pick_examples(self._examples())
        write_report(self.folder, self.scores, examples)
        tracker.progress.console.print(end_view(self.folder.metric_rows(), self.scores, examples))

    def _examples(self) -> list[Example]:
        before = {(one["question"], one["db_id"]): one for one in self.before}
        return [
            Example(
                one.question,
                one.db_id,
                one.gold,
                before[key]["answer"],
                one.answer,
                before[key]["right"],
                one.right,
            )
            for one in (self.after.answers if self.after else ())
            if (key := (one.question, one.db_id)) in before
        ]
