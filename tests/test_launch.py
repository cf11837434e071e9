"""launch.py: dry runs, refusals, the choice of the cluster. Nothing here submits; the life of a job has its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlight import chaining, launching, plan, presets
from slurmlight.cluster.submit import sbatch_parameters, script
from slurmlight.errors import UserError
from tests.shared import REPOSITORY


def launch(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run launch.py away from any Slurm."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | environment
    env["PATH"] = os.pathsep.join(part for part in env["PATH"].split(os.pathsep) if not (Path(part) / "sbatch").exists())
    command = [sys.executable, str(REPOSITORY / "launch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


def test_dry_run_prints_the_job_that_would_be_submitted(tmp_path: Path) -> None:
    done = launch("--preset", "qwen", "--partition", "a800", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in (
        "#SBATCH --gres=gpu:a800:4",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --partition=a800",
    ):
        assert line in done.stdout
    assert '"train_batch_size": 32' in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing written, nothing submitted


def test_o15_a_dry_run_of_two_nodes_is_the_same_bytes_twice(tmp_path: Path) -> None:
    command = ("--preset", "qwen", "--partition", "a800", "--nodes", "2", "--dry-run")
    first, second = (launch(*command, cwd=tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout
    job = first.stdout.split("# ---- job script ----\n")[1].split("\n# ---- plan ----")[0]
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    assert {"--nodes=2", "PYTHONNOUSERSITE=1"} <= {word for line in job.splitlines() for word in line.split()}
    assert "sleep" not in job and "symmetric-run" not in job


def test_a_dry_run_shows_the_evaluation_that_would_follow(tmp_path: Path) -> None:
    done = launch("--preset", "qwen", "--partition", "a800", "--account", "mine", "--then-eval", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    training, evaluation = done.stdout.split("# ---- and then, when it has finished ----")
    job = evaluation.split("the job above) ----\n")[1].split("\n# ---- plan of")[0]
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    for line in ("--dependency=afterok:JOB", "--kill-on-invalid-dep=yes", "--requeue", "--gres=gpu:a800:4", "--account=mine"):
        assert f"#SBATCH {line}" in job
    assert "checkpoints/qwen/eval/newest" in evaluation and "dependency=" not in training
    assert list(tmp_path.iterdir()) == []


def test_the_evaluation_of_a_dry_run_is_planned_as_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    preset = presets.load("qwen", ["engine.stack=current"])
    training = launching.make_plan(preset, "local", None, True, {})
    shown = chaining.plan_after(training, preset, True, {})
    (tmp_path / "data").mkdir()
    (tmp_path / preset.data.val_files).touch()
    assert shown.plan == chaining.plan_after(training, preset, False, {}).plan


def test_o12_a_hostile_name_is_quoted_data_not_shell(tmp_path: Path) -> None:
    done = launch(
        "--preset", "qwen", "--partition", "a800", "--dry-run", "--set", "trainer.experiment_name=a b; touch x", cwd=tmp_path
    )
    assert done.returncode == 0
    assert "touch x" not in done.stdout.split("# ---- plan")[0]
    assert not (tmp_path / "x").exists()


def test_x01_secrets_of_the_environment_appear_by_name_only(tmp_path: Path) -> None:
    secrets = {
        "SWANLAB_API_KEY": "abcdefgh12345678",
        "HF_TOKEN": "hf_ABCDEFGHIJKLMNOPQRST",
        "WANDB_API_KEY": "a\"b$c'd\nline2xyz",
    }
    done = launch("--preset", "qwen", "--partition", "a800", "--dry-run", cwd=tmp_path, **secrets)
    assert done.returncode == 0
    for value in (value for text in secrets.values() for value in text.splitlines()):
        assert value not in done.stdout + done.stderr
    assert "SWANLAB_API_KEY" in done.stdout


def test_o13_offline_flag_is_handed_on_by_name(tmp_path: Path) -> None:
    done = launch("--preset", "qwen", "--partition", "a800", "--dry-run", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert '"HF_HUB_OFFLINE"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--preset", "qwen-1.5"), ("qwen-1.5", "did you mean qwen", "tiny")),
        (("--preset", "qwen", "--partition", "a8000", "--dry-run"), ("a8000", "did you mean a800")),
        (
            ("--preset", "qwen", "--partition", "a800", "--dry-run", "--set", "actor_rollout_ref.actor.optimm.lr=1"),
            ("optimm", "optim"),
        ),
        (
            ("--preset", "qwen", "--partition", "a800", "--dry-run", "--set", "trainer.save_freq=often"),
            ("save_freq", "often", "int"),
        ),
        (("--preset", "qwen", "--partition", "a800", "--dry-run", "--gpus", "8"), ("8", "4", "a800")),
        (("--preset", "qwen"), ("no Slurm answers here", "--preset tiny")),
        (("--preset", "tiny", "--name", "../x"), ("'../x'",)),
        (("--preset", "tiny", "--time", "soon", "--dry-run"), ("soon", "HH:MM:SS")),
        (
            ("--preset", "qwen", "--partition", "a800", "--dry-run", "--account", "a\n#SBATCH --nodes=9"),
            ("account", "control characters"),
        ),
        (("--preset", "qwen", "--cluster", "local", "--then-eval"), ("data file", "does not exist")),
        (("--preset", "tiny", "--no-follow", "--then-eval", "--dry-run"), ("--no-follow and --then-eval",)),
        (
            ("--preset", "tiny", "--dry-run", "--set", 'reward=[{name="a",weight=1.0,file="/nonexist.py"}]'),
            ("reward 'a'", "/nonexist.py"),
        ),
        (("--preset", "tiny", "--cluster", "slurm", "--mem", "x", "--dry-run"), ("--mem='x'", "64G")),
        (("--preset", "tiny", "--dry-run", "--runtime", "foo"), ("runtime 'foo'", "apptainer")),
        (("--preset", "tiny", "--dry-run", "--runtime", "podman"), ("runtime 'podman'", "no image")),
        (("--preset", "tiny", "--partition", "a\nb", "--dry-run"), (r"'a\nb'", "a800")),
        (("--preset", "tiny", "--nodes", "0"), ("'--nodes'", "0", "see launch.py --help")),
        (("--preset", "tiny", "--cluster", "foo"), ("'--cluster'", "'foo'", "see launch.py --help")),
        (("--preset", "tiny", "--no-such\noption"), ("--no-such", "see launch.py --help")),
        ((), ("'--preset'", "see launch.py --help")),
        (("--preset", "nowhere.toml"), ("nowhere.toml", "does not exist")),
        (
            ("--preset", "qwen", "--partition", "a800", "--dry-run", "--set", "env.HF_TOKEN=hf_abcdefgh"),
            ("HF_TOKEN", "export it"),
        ),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments: tuple[str, ...], told: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    for word in told:
        assert word in done.stderr
    assert "hf_abcdefgh" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["launch", "--preset", "tiny", "--nodes", "0"], ("'--nodes'", "slurmlight.cli launch --help")),
        (["sql", "check"], ("'--db'", "slurmlight.cli sql check --help")),
        (["no-such-command"], ("'no-such-command'", "slurmlight.cli --help")),
        (["ask", "--db", "x" * 300, "how many?"], ("File name too long",)),
    ],
)
def test_option_errors_of_any_command_are_one_line(arguments: list[str], told: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "slurmlight.cli", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("slurmlight: ")
    assert [word for word in told if word not in done.stderr] == []


def test_the_help_of_launch_py_is_its_own(tmp_path: Path) -> None:
    for flag in ("--help", "-h"):
        done = launch(flag, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.startswith("Usage: launch.py [OPTIONS]\n")


def test_inside_a_job_an_unknown_runtime_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMLIGHT_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(UserError, match="unknown container runtime 'foo'"):
        launching.run_here(presets.load("tiny"), None, {"runtime": "foo"})
    assert list(tmp_path.iterdir()) == []


def tiny(folder: Path, *overrides: str) -> tuple[plan.JobPlan, presets.Preset]:
    preset = presets.load("tiny", overrides)
    return plan.make_plan(preset, name="tiny", project=folder, cluster="local", python=sys.executable), preset


def test_a_run_is_taken_up_again_only_with_the_configuration_it_began_with(tmp_path: Path) -> None:
    launching.prepare(*tiny(tmp_path), fresh=False)
    launching.prepare(*tiny(tmp_path, "trainer.total_training_steps=40", "job.step_s=900"), fresh=False)
    with pytest.raises(UserError, match=r"engine.seed: 0 -> 7.*--fresh"):
        launching.prepare(*tiny(tmp_path, "engine.seed=7"), fresh=False)
    launching.prepare(*tiny(tmp_path, "engine.seed=7"), fresh=True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["tiny", "tiny~1"]


def test_toy_data_are_not_generated_for_somebody_elses_train_file(tmp_path: Path) -> None:
    launching.check_inputs(*tiny(tmp_path))
    with pytest.raises(UserError, match=r"data\.train_files: .*nope\.parquet is none of the generated files"):
        launching.check_inputs(*tiny(tmp_path, f"data.train_files={tmp_path}/nope.parquet"))
    (tmp_path / "train.parquet").write_text("mine")
    with pytest.raises(UserError, match=r"holds a train\.parquet that is not generated"):
        launching.check_inputs(*tiny(tmp_path, "data.train_files=train.parquet"))


def test_a_run_that_cannot_be_read_is_not_launched(tmp_path: Path) -> None:
    made, preset = tiny(tmp_path)
    run = launching.prepare(made, preset, fresh=False)
    run.job.mkdir()
    with pytest.raises(UserError, match=r"run tiny: .*job\.json cannot be used \(Is a directory\)"):
        launching.begin(made, preset, "as asked", fresh=False, follow=False)


def test_more_steps_reopen_a_finished_run(tmp_path: Path) -> None:
    run = launching.prepare(*tiny(tmp_path), fresh=False)
    run.mark_finished(30, 1)
    assert launching.prepare(*tiny(tmp_path), fresh=False).finished()
    assert not launching.prepare(*tiny(tmp_path, "trainer.total_training_steps=60"), fresh=False).finished()


def test_the_job_script_is_submitits_own(tmp_path: Path) -> None:
    preset = presets.load("qwen", ["job.requeue=false"])
    made = plan.make_plan(
        preset, name="q", project=tmp_path, cluster="slurm", python=sys.executable, partition="a800", modules=("apptainer/1.3",)
    )
    text = script(made)
    assert "#SBATCH --no-requeue" in text and "#SBATCH --requeue" not in text
    assert "module load apptainer/1.3" in text
    assert text.index("trap '' USR2 TERM") < text.index("module load")
    assert sbatch_parameters(made)["time"] == 24 * 60
