"""What an evaluation asks: which model, which questions, how they are answered. EVAL/config.json holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.files import read_json
from slurmlight.presets import Preset
from slurmlight.secrets import redact

Kind = Literal["checkpoint", "baseline", "endpoint"]
FREE_KEYS = ("in_flight", "against")  # may change when an evaluation is taken up again: they change no answer
SERVED_IN_FLIGHT = 512  # episodes in flight against vLLM or a foreign server


class EvalConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One evaluation. ``run`` is the training run's folder ("": none), ``step`` None for its newest complete checkpoint.

    ``preset`` is the resolved preset whose agent, limits and data are used (JSON values). ``temperature`` 0 is greedy.
    """

    kind: Kind
    preset: dict[str, Any]
    data: str
    database_dir: str
    run: str = ""
    step: int | None = None
    endpoint: str = ""
    model: str = ""
    instances: int = 1
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None
    in_flight: int = 0
    against: str = ""

    @property
    def greedy(self) -> bool:
        return self.samples == 1 and self.temperature == 0

    @property
    def measure(self) -> str:
        """The name of what is measured. Two evaluations can be compared only where it is the same."""
        return "greedy accuracy" if self.greedy else f"mean@{self.samples} at temperature {self.temperature:g}"

    def training(self) -> Preset:
        return presets.from_json(self.preset)


def check(config: EvalConfig) -> EvalConfig:
    """``config``, or a UserError for what cannot be measured."""
    if config.samples < 1:
        raise UserError(f"--samples {config.samples}: at least one answer a question is needed", "give 1 or more")
    if config.samples > 1 and config.temperature == 0:
        raise UserError(
            f"--samples {config.samples} at temperature 0 would give {config.samples} equal answers",
            "give --temperature above 0",
        )
    if not 0 <= config.temperature <= 2:
        raise UserError(f"--temperature {config.temperature:g} is out of range", "give a value from 0 (greedy) to 2")
    if config.limit is not None and config.limit < 1:
        raise UserError(f"--limit {config.limit} leaves no question", "give 1 or more")
    if config.kind == "endpoint" and not config.endpoint.startswith(("http://", "https://")):
        raise UserError(f"--endpoint {redact(config.endpoint)!r} is no URL", "give one like http://host:8000/v1")
    if "@" in urlsplit(config.endpoint).netloc:
        raise UserError("--endpoint holds a user or password, which would stand in reports", "export the key as OPENAI_API_KEY")
    return config


def default_name(config: EvalConfig) -> str:
    """A folder name that tells evaluations of one run apart; ``newest`` where the step is only known when the job starts."""
    what = config.kind if config.kind != "checkpoint" else f"step-{config.step}" if config.step is not None else "newest"
    how = "" if config.greedy else f"-n{config.samples}-t{config.temperature:g}"
    preset = config.training()
    usual = preset.data.test_files or preset.data.val_files
    data = "" if Path(config.data).name == Path(usual).name else f"-{Path(config.data).stem}"
    return f"{what}{how}{data}" + (f"-first{config.limit}" if config.limit else "")


def to_json(config: EvalConfig) -> dict[str, Any]:
    return msgspec.to_builtins(config)


def read_config(folder: Path) -> EvalConfig:
    """The evaluation in ``folder``. Raises UserError where there is none or another version's."""
    value = read_json(folder / "config.json")
    try:
        return check(msgspec.convert(value, EvalConfig))
    except msgspec.ValidationError as error:
        raise UserError(f"{folder / 'config.json'} holds no evaluation ({error})", "start one with: slurmlight eval") from None


def complete(folder: Path) -> bool:
    """Whether the report in ``folder`` lacks no question.

    A partial evaluation has the finish mark, too, so that no supervisor comes back for it; whoever starts it again wants the
    open questions asked.
    """
    summary = read_json(folder / "report" / "summary.json")
    return isinstance(summary, dict) and bool(summary.get("complete"))
