"""Sections of a preset that decide how well a policy learns: rewards, credit, curriculum, stability. All are the kit's own."""

from typing import Annotated, Literal

from msgspec import Meta

from slurmlight.presets.base import Section


class RewardPart(Section, frozen=True, kw_only=True):
    """One ``[[reward]]``: the episode's reward is the weighted sum of all of them."""

    name: Annotated[str, Meta(description="a reward of docs/learning.md, or the function's name in file [kit]")]
    weight: Annotated[float, Meta(gt=0, le=1, description="share of the sum; all weights sum to 1 [kit]")] = 1.0
    file: Annotated[str, Meta(description="Python file with your own reward; empty: one of the kit's [kit]")] = ""


class ScoringSection(Section, frozen=True, kw_only=True):
    evaluator: Annotated[
        Literal["strict", "official"],
        Meta(description="evaluator of execution match: the kit's strict one or the published one [kit]"),
    ] = "strict"
    normalize: Annotated[
        bool, Meta(description="divide training rewards by their running deviation, less their running mean [kit]")
    ] = False
    clip: Annotated[
        float, Meta(ge=0, description="bound of a training reward, after normalisation where that is on; 0: none [kit]")
    ] = 0.0


class CreditSection(Section, frozen=True, kw_only=True):
    kind: Annotated[
        Literal["all", "last", "discounted", "process"],
        Meta(description="how an episode's advantage reaches its calls: alike, last only, gamma backwards, own parts [kit]"),
    ] = "all"
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount a call, backwards from the last (discounted) [kit]")] = 0.9


class Phase(Section, frozen=True, kw_only=True):
    """One ``[[curriculum]]``; the last goes on to the end of training."""

    difficulty: Annotated[float, Meta(ge=0, le=1, description="ceiling of the tasks' difficulty, 1: all tasks [kit]")] = 1.0
    rounds: Annotated[int, Meta(ge=0, description="length: passes over the phase's tasks [kit]")] = 0
    steps: Annotated[int, Meta(ge=0, description="length in steps, instead of rounds [kit]")] = 0
    adversarial: Annotated[
        bool, Meta(description="reworded questions, renamed columns, misleading values instead of the tasks themselves [kit]")
    ] = False


class SamplingSection(Section, frozen=True, kw_only=True):
    difficulty: Annotated[
        Literal["hardness", "solve_rate"],
        Meta(description="difficulty from the gold query (easy .25 to extra 1) or from the measured solve rate [kit]"),
    ] = "hardness"
    prefer_mixed: Annotated[
        bool, Meta(description="draw tasks that are sometimes solved more often than those always or never solved [kit]")
    ] = False


class StabilitySection(Section, frozen=True, kw_only=True):
    """Alarms compare a step with those before it; 0 turns one off."""

    on_alarm: Annotated[
        Literal["warn", "stop", "fallback"],
        Meta(description="warn; save and stop; or go on from the last good checkpoint with a smaller learning rate [kit]"),
    ] = "warn"
    fallback_lr: Annotated[float, Meta(gt=0, lt=1, description="factor of the learning rate at each fallback [kit]")] = 0.1
    max_fallbacks: Annotated[int, Meta(ge=1, description="fallbacks before the run stops for a person [kit]")] = 3
    patience: Annotated[int, Meta(ge=1, description="steps in a row that must show a trouble (not for KL and NaN) [kit]")] = 3
    entropy_floor: Annotated[
        float, Meta(ge=0, lt=1, description="entropy collapse: below this share of the first steps' entropy [kit]")
    ] = 0.02
    kl_ceiling: Annotated[
        float, Meta(ge=0, description="KL blow-up: ppo_kl or kl_loss of a step above this, nats a token [kit]")
    ] = 0.5
    reward_floor: Annotated[
        float, Meta(ge=0, lt=1, description="reward collapse: below this share of the best five-step mean [kit]")
    ] = 0.5
    length_ceiling: Annotated[
        float, Meta(ge=0, description="length explosion: completions this many times as long as in the first steps [kit]")
    ] = 3.0
    zero_groups: Annotated[
        float, Meta(ge=0, le=1, description="nothing to learn: at least this share of groups with equal rewards [kit]")
    ] = 1.0
    target_kl: Annotated[
        float, Meta(ge=0, description="target of kl_loss that adapts actor.kl_loss_coef, nats a token; 0: fixed [kit]")
    ] = 0.0
    kl_coef_max: Annotated[float, Meta(gt=0, description="largest coefficient that adapting may reach [kit]")] = 0.3
