"""The update: order of rows, size of micro batches and a restart change nothing; and what an episode hands to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmlight import presets
from slurmlight.errors import UserError
from slurmlight.presets import Preset
from slurmlight.presets.learning import StabilitySection
from slurmlight.train.embedded.actor import Actor, Row, response_logprobs
from slurmlight.train.embedded.batch import make_batch, statistics
from slurmlight.train.embedded.order import DataOrder, episode_seed
from slurmlight.train.rollouts.play import Call, Job, Played
from tests.trainbed import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


def make_actor(folder: Path, *overrides: str) -> Actor:
    return Actor(presets.load("tiny", [f"actor_rollout_ref.model.path={folder}", *overrides]))


def sampled(actor: Actor, count: int = 12) -> list[Row]:
    """Rows as the actor's own policy would have sampled them, of several lengths, with advantages of both signs."""
    rng = random.Random(3)
    rows = []
    for index in range(count):
        prompt, response = (tuple(rng.randrange(300) for _ in range(rng.randint(*size))) for size in ((5, 40), (1, 12)))
        with torch.no_grad():
            logprobs, _ = response_logprobs(actor.model, [Row(0, 0, prompt, response, (), 0.0)], 1.0)
        rows.append(Row(index // 4, index % 4, prompt, response, tuple(logprobs.tolist()), rng.choice([-1.2, 0.4, 0.9])))
    return rows


def state(actor: Actor) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in actor.model.state_dict().values()]


def test_the_order_in_which_rows_came_back_changes_no_bit(folder: Path) -> None:
    ends = []
    for seed in range(3):
        actor = make_actor(folder)
        rows = sampled(actor)
        random.Random(seed).shuffle(rows)
        metrics = actor.update([rows])
        ends.append((state(actor), metrics))
    assert ends[0] == ends[1] == ends[2]


def test_micro_batches_add_up_to_the_token_mean_of_the_mini_batch(folder: Path) -> None:
    whole, cut = make_actor(folder), make_actor(folder, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5")
    rows = sampled(whole)
    one, several = whole.update([rows]), cut.update([rows])
    assert several == pytest.approx(one, rel=1e-4, abs=1e-6)
    for mine, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_the_gradient_is_that_of_the_loss_written_out(folder: Path) -> None:
    """On policy the ratio is 1: the gradient is that of -sum(advantage * logprob) / tokens."""
    actor = make_actor(folder, "actor_rollout_ref.actor.grad_clip=1e9")
    rows = sampled(actor)
    list(actor._accumulate(rows))
    found = [parameter.grad.clone() for parameter in actor.model.parameters() if parameter.grad is not None]
    actor.optimizer.zero_grad()
    logprobs, _ = response_logprobs(actor.model, rows, 1.0)
    weight = torch.tensor([row.advantage for row in rows for _ in row.response])
    (-(weight * logprobs).sum() / len(logprobs)).backward()
    wanted = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_an_update_makes_good_answers_likelier_and_bad_ones_less_likely(folder: Path) -> None:
    actor = make_actor(folder, "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    rows = sampled(actor)
    for _ in range(5):
        actor.update([rows])
    for row in rows:
        with torch.no_grad():
            now, _ = response_logprobs(actor.model, [row], 1.0)
        assert (now.sum().item() > sum(row.logprobs)) == (row.advantage > 0)


def test_a_mini_batch_without_rows_makes_no_step(folder: Path) -> None:
    actor = make_actor(folder)
    before = state(actor)
    assert actor.update([[], []]) == {}
    assert (state(actor), actor.updates) == (before, 0)


def test_warm_up_rises_from_the_first_step_on(folder: Path) -> None:
    actor = make_actor(folder, "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr_warmup_steps=4")
    rows = sampled(actor)
    rates = [actor.update([rows])["actor/lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_kl_against_the_reference_holds_the_policy_back(folder: Path) -> None:
    free = make_actor(folder, "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    held = make_actor(
        folder,
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=10.0",
    )
    rows = sampled(free)
    assert held.update([rows])["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)  # the reference is the start
    free.update([rows])
    for _ in range(6):
        free.update([rows])
        last = held.update([rows])["actor/kl_loss"]
    assert last > 0
    distance = [
        sum(
            (mine - start).square().sum().item()
            for mine, start in zip(a.model.parameters(), held.reference.parameters(), strict=True)
        )
        for a in (free, held)
        if held.reference
    ]
    assert distance[1] < distance[0]


def test_a_saved_actor_goes_on_with_the_same_bits(folder: Path, tmp_path: Path) -> None:
    first = make_actor(folder)
    rows = sampled(first)
    first.update([rows[:8], rows[8:]])
    (tmp_path / "actor").mkdir()
    first.save(tmp_path / "actor")
    second = make_actor(folder)
    second.load(tmp_path / "actor")
    assert first.update([rows]) == second.update([rows])
    assert state(first) == state(second)
    assert make_actor(tmp_path / "actor/huggingface").model.config.hidden_size == 96  # a model folder like any other


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    actor = make_actor(folder)
    actor.save(tmp_path)
    torch.save({"model.norm.weight": torch.ones(96)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(UserError, match="of another model"):
        actor.load(tmp_path)


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    """The same update with activations recomputed in backward: the same weights to the last bits that float32 holds."""
    plain = make_actor(folder)
    saving = make_actor(folder, "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    assert saving.model.is_gradient_checkpointing and not plain.model.is_gradient_checkpointing
    rows = sampled(plain)
    assert saving.update([rows]) == pytest.approx(plain.update([rows]), rel=1e-5)
    for one, other in zip(plain.model.parameters(), saving.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_no_number_makes_no_step(folder: Path) -> None:
    actor = make_actor(folder)
    before, rows = state(actor), sampled(actor)
    rows[0] = replace(rows[0], advantage=float("nan"))
    metrics = actor.update([rows])
    assert state(actor) == before and actor.updates == 0
    assert metrics["training/not_a_number"] == 1


def test_the_kl_coefficient_is_kept_with_the_policy(folder: Path, tmp_path: Path) -> None:
    settings = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    actor, steady = make_actor(folder, *settings), StabilitySection(target_kl=0.01, kl_coef_max=0.3)
    assert actor.update([sampled(actor)])["actor/kl_coef"] == 0.1
    actor.adapt_kl({"actor/kl_loss": 0.5}, steady)
    actor.adapt_kl({"actor/kl_loss": 0.5}, steady)
    actor.save(tmp_path)
    resumed = make_actor(folder, *settings)
    resumed.load(tmp_path)
    assert resumed.settings.kl_loss_coef == 0.3


# from episodes to rows


def played(rewards: Sequence[float | None]) -> list[Played]:
    return [
        Played(Job(str(index), {}, True), reward, calls=() if reward is None else (Call((1, index), (2,), (-1.0,)),) * 2)
        for index, reward in enumerate(rewards)
    ]


def small(n: int, mini: int) -> Preset:
    return presets.load(
        "tiny",
        [
            f"actor_rollout_ref.rollout.n={n}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
            f"data.train_batch_size={mini}",
        ],
    )


def test_every_call_of_an_episode_has_its_advantage_and_uniform_groups_are_left_out() -> None:
    batch = make_batch(played([1, 0, 1, 1, 0, 0]), small(n=2, mini=1))
    assert [len(rows) for rows in batch.mini_batches] == [4, 0, 0]
    assert (batch.groups, batch.uniform) == (3, 2)
    assert [round(row.advantage, 4) for row in batch.mini_batches[0]] == [0.7071, 0.7071, -0.7071, -0.7071]


def test_a_failed_episode_leaves_its_group_smaller_and_is_no_reward_of_0() -> None:
    episodes = played([1, None, 0, 1, None, None])
    batch = make_batch(episodes, small(n=3, mini=2))
    assert {row.sample for row in batch.mini_batches[0]} == {0, 2}
    assert (batch.groups, batch.uniform) == (2, 1)  # one episode alone has nothing to be compared with
    row = statistics(episodes, batch)
    assert (row["training/n_rollouts"], row["training/n_failed_rollouts"]) == (6, 3)
    assert row["training/reward"] == pytest.approx(2 / 3)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_shows_every_task_at_most_once_and_none_twice(size: int, batch: int, seed: int) -> None:
    if size < batch:
        with pytest.raises(UserError):
            DataOrder(size, batch, seed)
        return
    order = DataOrder(size, batch, seed)
    first = [task for step in range(1, order.steps_per_epoch + 1) for task in order.tasks(step)]
    assert len(set(first)) == len(first) == order.steps_per_epoch * batch
    assert order.epoch(order.steps_per_epoch) == 0
    assert order.epoch(order.steps_per_epoch + 1) == 1
    assert order.tasks(1) == DataOrder(size, batch, seed).tasks(1)


def test_epochs_and_seeds_shuffle_differently() -> None:
    order = DataOrder(100, 50, 0)
    orders = {tuple(order.tasks(step)) for step in range(1, 7)} | {tuple(DataOrder(100, 50, 1).tasks(1))}
    assert len(orders) == 7


def test_no_two_episodes_of_a_run_share_a_seed() -> None:
    seeds = {episode_seed(0, step, task, sample) for step in range(30) for task in range(12) for sample in range(8)}
    assert len(seeds) == 30 * 12 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
