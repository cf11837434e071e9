"""The typed form of a preset. Keys under data, algorithm, actor_rollout_ref and trainer are verl's own names.

Sources in brackets: [verl] is the key's meaning in verl 0.5-0.9, [spider] the documented 4 x A800 Spider run,
[kit] this project's own choice. Every model is frozen and refuses unknown keys.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from slurmlight.presets.base import Section
from slurmlight.presets.learning import CreditSection, Phase, RewardPart, SamplingSection, ScoringSection, StabilitySection


class EngineSection(Section, frozen=True, kw_only=True):
    name: Annotated[Literal["embedded", "verl"], Meta(description="embedded: one CPU machine; verl: Ray + FSDP + vLLM [kit]")]
    stack: Annotated[
        Literal["none", "seed", "current"],
        Meta(description="pinned package set of the verl engine: seed (CUDA 12.8) or current (CUDA 13) [kit]"),
    ] = "none"
    # numpy takes 32 bits of it, and verl adds the number of the vLLM engine
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1, description="seed of sampling, shuffling and initialisation [kit]")] = 0
    threads: Annotated[
        int, Meta(ge=1, description="CPU threads of one torch process (embedded) [kit: more is slower under load]")
    ] = 1


class JobSection(Section, frozen=True, kw_only=True):
    """What the job asks of the cluster; flags of launch.py override each."""

    nodes: Annotated[int, Meta(ge=1, description="nodes of the job [spider: 1]")] = 1
    gpus: Annotated[int, Meta(ge=0, description="GPUs a node [spider: 4]")] = 0
    gpu_type: Annotated[str, Meta(description="GRES type, for instance a800; empty: the partition's [kit]")] = ""
    cpus: Annotated[int, Meta(ge=1, description="CPU cores a node [kit]")] = 8
    mem: Annotated[str, Meta(description="memory a node in Slurm's spelling (64G); empty: the partition's default [kit]")] = ""
    time: Annotated[str, Meta(description="time limit in Slurm's spelling: minutes, HH:MM:SS or D-HH:MM:SS [kit]")] = "24:00:00"
    signal_lead_s: Annotated[int, Meta(ge=10, description="seconds before the time limit at which Slurm sends USR2 [kit]")] = (
        120
    )
    requeue: Annotated[bool, Meta(description="come back after preemption, node failure, time limit and crash [kit]")] = True
    requeue_cap: Annotated[int, Meta(ge=0, description="requeues after a crash or hang before a person is asked [kit]")] = 50
    image: Annotated[str, Meta(description="container image (path or reference); empty: no container [kit]")] = ""
    first_step_s: Annotated[
        int, Meta(ge=10, description="deadline of an attempt's first step, seconds from its start [kit]")
    ] = 1800
    step_s: Annotated[int, Meta(ge=10, description="deadline of every later step, seconds since the last heartbeat [kit]")] = (
        1200
    )


class DataSection(Section, frozen=True, kw_only=True):
    train_files: Annotated[str, Meta(min_length=1, description="parquet with columns question, db_id, query [spider]")]
    val_files: Annotated[str, Meta(min_length=1, description="parquet used for validation during training [spider]")]
    test_files: Annotated[str, Meta(description="parquet nobody tuned on; scored before and after training [kit]")] = ""
    unseen_files: Annotated[str, Meta(description="parquet on databases never trained on; reported apart [kit]")] = ""
    database_dir: Annotated[str, Meta(description="folder of databases, DB/DB.sqlite, beside the parquet files [kit]")] = (
        "database"
    )
    instances: Annotated[
        int, Meta(ge=1, description="instances of each database a query must match on (DB/DB.sqlite, DB/DB-2.sqlite) [kit]")
    ] = 1
    train_batch_size: Annotated[int, Meta(ge=1, description="tasks a step [verl, spider: 32]")] = 32
    val_batch_size: Annotated[int, Meta(description="tasks a validation batch; None: all at once (no fewer) [verl]")] | None = (
        None
    )
    max_prompt_length: Annotated[int, Meta(ge=1, description="tokens of a prompt [spider]")] = 4096
    max_response_length: Annotated[int, Meta(ge=1, description="tokens of a completion [spider]")] = 2048
    truncation: Annotated[
        Literal["error", "left", "right", "middle"],
        Meta(description="what to do with prompts over the limit [verl, spider: error]"),
    ] = "error"


class AlgorithmSection(Section, frozen=True, kw_only=True):
    adv_estimator: Annotated[Literal["grpo"], Meta(description="group-relative advantages [spider]")] = "grpo"
    use_kl_in_reward: Annotated[bool, Meta(description="KL penalty inside the reward [spider: off]")] = False
    norm_adv_by_std_in_grpo: Annotated[bool, Meta(description="divide the centred reward by the group's deviation [verl]")] = (
        True
    )


Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimSection(Section, frozen=True, kw_only=True):
    lr: Annotated[float, Meta(gt=0, description="AdamW learning rate [spider]")] = 1e-6
    lr_warmup_steps: Annotated[int, Meta(ge=0, description="linear warm-up, optimiser steps [verl]")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay [verl]")] = 0.01
    betas: Annotated[tuple[Beta, Beta], Meta(description="AdamW betas [verl]")] = (0.9, 0.999)


class FsdpSection(Section, frozen=True, kw_only=True):
    param_offload: Annotated[bool, Meta(description="parameters on the CPU between uses [spider: off]")] = False
    optimizer_offload: Annotated[bool, Meta(description="optimiser state on the CPU [spider: off]")] = False


class ActorSection(Section, frozen=True, kw_only=True):
    ppo_mini_batch_size: Annotated[int, Meta(ge=1, description="tasks an optimiser step [spider]")] = 32
    ppo_micro_batch_size_per_gpu: Annotated[int, Meta(ge=1, description="rows a forward-backward pass [spider]")] = 4
    ppo_epochs: Annotated[int, Meta(ge=1, description="passes over a batch [verl]")] = 1
    optim: OptimSection = OptimSection()
    use_kl_loss: Annotated[bool, Meta(description="KL against the reference in the loss [spider: off]")] = False
    kl_loss_coef: Annotated[float, Meta(ge=0, description="weight of that KL [verl]")] = 0.001
    entropy_coeff: Annotated[float, Meta(ge=0, description="entropy bonus [verl]")] = 0.0
    clip_ratio_low: Annotated[float, Meta(gt=0, lt=1, description="lower clip of the ratio [spider]")] = 0.2
    clip_ratio_high: Annotated[float, Meta(gt=0, description="upper clip of the ratio [spider]")] = 0.3
    grad_clip: Annotated[float, Meta(gt=0, description="gradient norm clip [verl]")] = 1.0
    loss_agg_mode: Annotated[Literal["token-mean"], Meta(description="mean over all tokens of a mini batch [verl]")] = (
        "token-mean"
    )
    fsdp_config: FsdpSection = FsdpSection()


class MultiTurnSection(Section, frozen=True, kw_only=True):
    format: Annotated[str, Meta(description="tool-call parser of the rollout server [spider]")] = "hermes"


class RolloutSection(Section, frozen=True, kw_only=True):
    name: Annotated[Literal["vllm", "embedded"], Meta(description="who generates [spider: vllm]")] = "vllm"
    n: Annotated[int, Meta(ge=1, description="episodes a task [spider: 4]")] = 4
    temperature: Annotated[float, Meta(ge=0, description="sampling temperature in training [verl]")] = 1.0
    tensor_model_parallel_size: Annotated[int, Meta(ge=1, description="GPUs an engine [spider: 1]")] = 1
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1, description="share of GPU memory for vLLM [spider]")] = 0.6
    log_prob_micro_batch_size_per_gpu: Annotated[int, Meta(ge=1, description="rows a log-prob pass [spider]")] = 4
    free_cache_engine: Annotated[bool, Meta(description="vLLM gives its memory back during the update [verl]")] = True
    multi_turn: MultiTurnSection = MultiTurnSection()
    enable_auto_tool_choice: Annotated[bool, Meta(description="tool choice auto [spider]")] = True
    tool_call_parser: Annotated[str, Meta(description="vLLM's tool parser [spider]")] = "hermes"


class RefSection(Section, frozen=True, kw_only=True):
    log_prob_micro_batch_size_per_gpu: Annotated[int, Meta(ge=1, description="rows a reference pass [spider]")] = 8
    fsdp_config: FsdpSection = FsdpSection()


class ModelSection(Section, frozen=True, kw_only=True):
    path: Annotated[
        str,
        Meta(min_length=1, description="HF folder, a path of two parts or more: verl serves it under the last two [spider]"),
    ]
    use_remove_padding: Annotated[bool, Meta(description="pack rows without padding; needs flash-attn [spider: on]")] = True
    enable_gradient_checkpointing: Annotated[bool, Meta(description="recompute activations in backward [spider: on]")] = True
    lora_rank: Annotated[int, Meta(ge=0, description="0: full fine-tuning [spider]")] = 0


class ActorRolloutRefSection(Section, frozen=True, kw_only=True):
    model: ModelSection
    actor: ActorSection = ActorSection()
    rollout: RolloutSection = RolloutSection()
    ref: RefSection = RefSection()


class TrainerSection(Section, frozen=True, kw_only=True):
    project_name: Annotated[str, Meta(description="tracker project [spider: Qwen3-1.7B-AgenticRL]")]
    experiment_name: Annotated[str, Meta(description="tracker experiment [spider: spider]")]
    logger: Annotated[
        tuple[Literal["console", "swanlab"], ...], Meta(description="where metrics go besides metrics.jsonl [spider]")
    ] = ("console", "swanlab")
    val_before_train: Annotated[bool, Meta(description="validate before the first step of the first attempt [spider]")] = True
    test_freq: Annotated[int, Meta(description="steps between validations; 0: never [verl, spider: 32]")] = 32
    save_freq: Annotated[int, Meta(description="steps between checkpoints; -1: never [verl, spider: 10]")] = 10
    total_epochs: Annotated[int, Meta(ge=1, description="passes over the training file [spider]")] = 2
    total_training_steps: Annotated[int, Meta(ge=1, description="steps in all; overrides total_epochs [verl]")] | None = None
    resume_mode: Annotated[
        Literal["auto"], Meta(description="go on from the newest complete checkpoint; launch --fresh starts over [spider]")
    ] = "auto"
    max_actor_ckpt_to_keep: Annotated[int, Meta(ge=1, description="newest checkpoints kept; None: all [kit]")] | None = 3
    keep_best: Annotated[bool, Meta(description="also keep the checkpoint with the best validation [kit]")] = True
    keep_every: Annotated[int, Meta(ge=0, description="also keep every m-th step; 0: none [kit]")] = 0


class AgentSection(Section, frozen=True, kw_only=True):
    name: Annotated[Literal["sql"], Meta(description="the agent [kit]")] = "sql"
    max_turns: Annotated[int, Meta(ge=1, description="write and rewrite calls an episode [spider]")] = 3
    check: Annotated[
        Literal["rule", "model"], Meta(description="who checks a result: a rule (error, empty) or the model [kit]")
    ] = "model"
    learn: Annotated[
        tuple[Literal["write", "check", "rewrite"], ...],
        Meta(description="calls that train the policy; the others go to the auxiliary channel [spider]"),
    ] = ("write", "rewrite")
    prompt: Annotated[
        Literal["full", "compact"], Meta(description="compact: table(col, ...) lines for the tiny policy [kit]")
    ] = "full"
    query_timeout_s: Annotated[float, Meta(gt=0, description="seconds a query may run [kit]")] = 5.0


class RunnerSection(Section, frozen=True, kw_only=True):
    n_runners: Annotated[int, Meta(ge=1, description="episodes in flight [spider: 32]")] = 32
    processes: Annotated[int, Meta(ge=1, description="runner processes that share them [kit]")] = 1
    rollout_timeout_s: Annotated[float, Meta(gt=0, description="seconds an episode may take before it is failed [kit]")] = 600.0
    max_failed_share: Annotated[
        float, Meta(gt=0, le=1, description="share of failed episodes in a step that ends the attempt [kit]")
    ] = 0.5


class WarmStartSection(Section, frozen=True, kw_only=True):
    """Supervised warm start of the generated tiny policy; weakened on purpose by taught habits."""

    steps: Annotated[int, Meta(ge=0, description="AdamW steps in all [kit]")] = 700
    clean_steps: Annotated[int, Meta(ge=0, description="steps before the habits begin [kit]")] = 480
    batch_size: Annotated[int, Meta(ge=1, description="demonstrations a step [kit]")] = 16
    lr: Annotated[float, Meta(gt=0, description="peak learning rate [kit]")] = 3e-3


class Preset(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="name of the preset and default name of the run [kit]")]
    about: Annotated[str, Meta(description="one line for people [kit]")] = ""
    engine: EngineSection
    job: JobSection = JobSection()
    data: DataSection
    algorithm: AlgorithmSection = AlgorithmSection()
    actor_rollout_ref: ActorRolloutRefSection
    trainer: TrainerSection
    agent: AgentSection = AgentSection()
    runner: RunnerSection = RunnerSection()
    reward: Annotated[tuple[RewardPart, ...], Meta(min_length=1, description="[[reward]]: parts of the reward [kit]")] = (
        RewardPart(name="execution_match"),
    )
    scoring: ScoringSection = ScoringSection()
    credit: CreditSection = CreditSection()
    curriculum: Annotated[tuple[Phase, ...], Meta(description="[[curriculum]]: phases; none: always all tasks [kit]")] = ()
    sampling: SamplingSection = SamplingSection()
    stability: StabilitySection = StabilitySection()
    warmstart: Annotated[WarmStartSection, Meta(description="warm start of the generated tiny policy [kit]")] | None = None
    verl: Annotated[dict[str, Any], Meta(description="any further verl key, dotted, handed to verl as it is [verl]")] = field(
        default_factory=dict
    )
