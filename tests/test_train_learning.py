"""Whole runs: resumed in the middle of each phase they end with the same bits; a ruined policy raises the alarm and recovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlight import presets
from slurmlight.runfolder import RunFolder
from slurmlight.train import main as payload
from slurmlight.train.checkpoints import scan
from slurmlight.train.embedded.fallback import fallbacks
from tests.test_train_embedded import rows, train
from tests.trainbed import make_run

pytestmark = pytest.mark.train
STEPS = 6
PHASES = "curriculum=[{difficulty=0.3,steps=2},{steps=2},{adversarial=true}]"
LEARNING = [
    PHASES,
    "sampling.prefer_mixed=true",
    "sampling.difficulty=solve_rate",
    "credit.kind=discounted",
    "scoring.normalize=true",
    "scoring.clip=2.0",
    "data.max_prompt_length=160",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.05",
    "actor_rollout_ref.actor.entropy_coeff=0.001",
    "stability.target_kl=0.0001",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
]


def weights(run: Path) -> bytes:
    return (run / f"global_step_{STEPS}/actor/huggingface/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


def test_killed_in_the_middle_of_each_phase_it_ends_with_the_same_bits(home: Path) -> None:
    """Each phase has two steps; killed before its second is saved, a run goes on from its first."""
    whole, killed = make_run(home, "whole", LEARNING), make_run(home, "killed", LEARNING)
    code, said = train(whole)
    assert code == 0, said
    for step in (2, 4, 6):
        code, said = train(killed, KILL_AT=f"row {step}")
        assert code == -signal.SIGKILL, said
    code, said = train(killed)
    assert code == 0, said
    assert weights(killed) == weights(whole)
    assert rows(killed) == rows(whole)
    assert [row["curriculum/phase"] for row in rows(whole).values()] == [1, 1, 2, 2, 3, 3]
    coefficients = [row["actor/kl_coef"] for row in rows(whole).values() if "actor/kl_coef" in row]
    assert coefficients[0] == 0.05 < max(coefficients) <= 0.3, "the KL coefficient moved, and was kept"


ALARMED = [
    "actor_rollout_ref.actor.optim.lr=9e-3",
    "stability.kl_ceiling=0.02",  # a random policy has nothing to lose: what x30 does to its KL is called a blow-up here
    "stability.fallback_lr=0.01",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
]


def test_a_fallback_survives_a_kill_before_it(home: Path) -> None:
    settings = [*ALARMED, "stability.on_alarm=fallback"]
    whole, killed = make_run(home, "fallback", settings), make_run(home, "fallback-killed", settings)
    code, said = train(whole)
    assert code == 0, said
    (fallback,) = fallbacks(whole)
    assert "KL blow-up" in fallback["why"] and f"alarm: {fallback['why']}" in said
    code, said = train(killed, KILL_AT=f"row {fallback['at_step']}")
    assert code == -signal.SIGKILL, said
    code, said = train(killed)
    assert code == 0, said
    assert fallbacks(killed) == [fallback]
    assert weights(killed) == weights(whole)
    assert rows(killed) == rows(whole)
    assert [path.name for path in whole.glob("alarm_step_*")] == [f"alarm_step_{fallback['at_step']}"]
    last = rows(whole)[STEPS]
    assert last["actor/lr"] == pytest.approx(9e-5) and abs(last["actor/ppo_kl"]) < 0.02


def test_an_alarm_stops_the_run_for_a_person(home: Path) -> None:
    run = make_run(home, "stopped", [*ALARMED, "stability.on_alarm=stop"])
    code, said = train(run)
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("slurmlight: ")]
    assert "KL blow-up at step 1" in line and "step 1 is saved" in line and "stability.on_alarm=fallback" in line
    assert [one.step for one in scan(run) if one.complete] == [1]


def test_a_reward_that_returns_nan_is_refused_before_anything_is_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(payload, "_listen", lambda run: None)  # the signals of a test process are pytest's
    monkeypatch.setenv("SLURMLIGHT_HOME", str(home))
    (home / "own.py").write_text("def own(judged): return float('nan')\n")
    run = make_run(home, "nan", ['reward=[{name="own",file="own.py"}]'])
    assert payload.main([str(run)]) == 2
    said = capsys.readouterr().err.strip()
    assert "reward 'own' returned nan" in said and len(said.splitlines()) == 1
    assert not list(run.glob("attempts/*/gateway.log"))


def test_a_learning_rate_times_30_raises_the_alarm_and_recovers(tmp_path: Path) -> None:
    """The real tiny task: a policy that was warm-started for 200 steps, its databases, its agent."""
    normal = presets.load("tiny").actor_rollout_ref.actor.optim.lr
    settings = [
        f"actor_rollout_ref.actor.optim.lr={30 * normal}",
        "stability.on_alarm=fallback",
        *("warmstart.steps=200", "warmstart.clean_steps=200"),
        *("data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=3", "actor_rollout_ref.rollout.n=6"),
        *("trainer.total_training_steps=8", "trainer.save_freq=1", "trainer.test_freq=0", 'trainer.logger=["console"]'),
        *("data.test_files=", "data.unseen_files="),
    ]
    run = tmp_path / "checkpoints/ruined"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(presets.to_json(presets.load("tiny", settings))))
    command = [sys.executable, "-m", "slurmlight.train.main", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SLURMLIGHT_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (fallback, *more) = fallbacks(run)
    assert not more
    assert fallback["at_step"] <= 5
    assert "KL blow-up" in fallback["why"] or "reward collapse" in fallback["why"]
    ruined = json.loads((run / "metrics.jsonl").read_text().splitlines()[fallback["at_step"] - 1])
    after = [row["training/reward"] for row in RunFolder(run).metric_rows()]
    assert len(after) == 8
    assert ruined["training/reward"] < 0.1 < sum(after[4:]) / 4
