"""Servers for the model under evaluation: the policy server, vLLM engines (one a GPU group), or somebody else's.

with serving(config, subject, logs) as servers:   # servers.borrow() -> Channel of the least busy one
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from slurmlight.agents.chat import THINKING_OFF
from slurmlight.agents.contract import Channel
from slurmlight.errors import UserError
from slurmlight.evaluate.config import EvalConfig
from slurmlight.evaluate.subject import Subject
from slurmlight.presets import Preset
from slurmlight.train.embedded.policy import PolicyServer
from slurmlight.train.rollouts.children import Child, ChildEnded, free_port
from slurmlight.train.verl import environment

KEY_NAME = "OPENAI_API_KEY"
SERVED_NAME = "policy"
START_S = 1800.0  # a large model from a slow file system, then its graphs
PROBE_S = 60.0
NO_GPU = ""  # the one engine of a machine without GPUs
VLLM_MEMORY = 0.9  # share of a GPU: nothing else runs there


class Servers:
    """Equal servers of one model, each with its number of episodes in flight. ``check`` raises ChildEnded for a dead one."""

    def __init__(self, channels: Sequence[Channel], check: Callable[[], None] = lambda: None) -> None:
        self.busy: dict[Channel, int] = dict.fromkeys(channels, 0)
        self.check = check

    @contextmanager
    def borrow(self) -> Iterator[Channel]:
        """The least busy server, for a whole episode: its turns share a prefix, which that server has cached."""
        channel = min(self.busy, key=lambda one: self.busy[one])
        self.busy[channel] += 1
        try:
            yield channel
        finally:
            self.busy[channel] -= 1


@contextmanager
def serving(config: EvalConfig, subject: Subject, logs: Path, beat: Callable[[], None] = lambda: None) -> Iterator[Servers]:
    """Servers that have answered a real completion. ``beat`` is called while one starts.

    Raises UserError (no vLLM here, a foreign server that refuses) and ChildEnded (a server that does not come up).
    """
    preset = config.training()
    if config.kind == "endpoint":
        channel = Channel(config.endpoint.rstrip("/"), os.environ.get(KEY_NAME, ""), config.model)
        yield Servers([_probe_foreign(channel)])
    elif preset.engine.name == "embedded":
        length = preset.data.max_prompt_length + preset.data.max_response_length
        with PolicyServer(Path(subject.model), length, preset.runner.n_runners, logs) as policy:
            channel = Channel(policy.endpoint, "", SERVED_NAME)
            _probe_own(policy, channel)
            yield Servers([channel], policy.check)
    else:
        with ExitStack() as stack:
            engines = [
                stack.enter_context(VllmEngine(Path(subject.model), preset, gpus, number, logs))
                for number, gpus in enumerate(gpu_groups(preset, os.environ) if preset.job.gpus else [NO_GPU])
            ]
            for engine in engines:
                engine.wait(beat)

            def check() -> None:
                for engine in engines:
                    engine.check()

            yield Servers([engine.channel for engine in engines], check)


def probe(channel: Channel) -> None:
    """One real completion: a health page answers before the weights can. Raises httpx.HTTPError or ValueError."""
    body = {"model": channel.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
    body |= THINKING_OFF if channel.template_kwargs else {}
    headers = {"Authorization": f"Bearer {channel.api_key}"} if channel.api_key else {}
    answer = httpx.post(f"{channel.base_url}/chat/completions", json=body, headers=headers, timeout=PROBE_S, trust_env=False)
    answer.raise_for_status()
    if not isinstance(answer.json(), dict) or not answer.json().get("choices"):
        raise ValueError("the answer is no chat completion")


def _probe_own(policy: PolicyServer, channel: Channel) -> None:
    """Raises ChildEnded: it was healthy a moment ago, but is gone, slow, or cannot compute with these weights."""
    try:
        probe(channel)
    except (httpx.HTTPError, ValueError) as error:
        policy.child.ends_within(1.0)
        policy.check()
        said = str(error) or type(error).__name__
        raise ChildEnded(f"the policy server gave no completion ({said}); see {policy.child.log}, then start again") from None


def _probe_foreign(channel: Channel) -> Channel:
    """``channel`` as that server can be asked. Raises UserError and ChildEnded."""
    try:
        probe(channel)
        return channel
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in (400, 422) and channel.template_kwargs:
            plain = _probe_foreign(replace(channel, template_kwargs=False))
            print(
                f"{channel.base_url} refuses chat_template_kwargs: asked without, so a model that thinks will think", flush=True
            )
            return plain
        if status >= 500 or status == 429:
            raise ChildEnded(f"{channel.base_url} answers with status {status}; see to that server, then start again") from None
        mend = f"export {KEY_NAME}" if status in (401, 403) else "check the URL (it ends in /v1) and --model"
        raise UserError(f"{channel.base_url} refuses a completion of {channel.model!r} with status {status}", mend) from None
    except (httpx.HTTPError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise ChildEnded(f"no completion from {channel.base_url} ({said}); see to that server, then start again") from None


def gpu_groups(preset: Preset, env: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine: the job's GPUs in groups of the run's tensor parallel size. Raises UserError."""
    shown = [one for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    gpus = shown or [str(number) for number in range(preset.job.gpus)]
    size = preset.actor_rollout_ref.rollout.tensor_model_parallel_size
    groups = [",".join(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)]
    if not groups:
        raise UserError(
            f"{len(gpus)} GPUs here, an engine of this run needs {size}", "ask for more with --gpus, or use --endpoint"
        )
    return groups


def vllm_command(model: Path, preset: Preset, port: int, gpus: str) -> list[str]:
    """One engine on the loopback interface. Its key is in the environment (VLLM_API_KEY), never in the command line."""
    rollout, data = preset.actor_rollout_ref.rollout, preset.data
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--tensor-parallel-size", str(rollout.tensor_model_parallel_size)),
        *("--max-model-len", str(data.max_prompt_length + data.max_response_length)),
        *("--gpu-memory-utilization", str(VLLM_MEMORY), "--dtype", "bfloat16", "--seed", str(preset.engine.seed)),
        "--enable-prefix-caching",
        *([] if gpus else ["--enforce-eager"]),
    ]


def engine_env(own: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """``own`` without what a person or the job's supervisor has set in ``env``, as in training; PYTHONPATH holds theirs."""
    return {name: value for name, value in own.items() if name == "PYTHONPATH" or name not in env}


class VllmEngine:
    """One vLLM server as a child of this process, on the GPUs of ``gpus`` (CUDA_VISIBLE_DEVICES) or on the CPU."""

    def __init__(self, model: Path, preset: Preset, gpus: str, number: int, logs: Path) -> None:
        self.model, self.preset, self.gpus, self.number, self.logs = model, preset, gpus, number, logs

    def __enter__(self) -> VllmEngine:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("vllm is not installed here", "run this in the image of the run's stack, or give --endpoint URL")
        key, port = os.urandom(16).hex(), free_port()
        self.channel = Channel(f"http://127.0.0.1:{port}/v1", key, SERVED_NAME)
        own = environment.gpu() if self.gpus else environment.cpu(self.logs, self.preset.engine.threads)
        env = engine_env(own, os.environ) | ({"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus else {})
        log = self.logs / f"vllm-{self.number}.log"
        command = vllm_command(self.model, self.preset, port, self.gpus)
        self.child = Child(f"vLLM engine {self.number}", command, log, env | {"VLLM_API_KEY": key})
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop(patience_s=15.0)

    def check(self) -> None:
        if not self.child.alive:
            raise ChildEnded(f"the {self.child.ending()}; see {self.child.log}, then start the evaluation again")

    def wait(self, beat: Callable[[], None]) -> None:
        """Until it has completed something. Raises ChildEnded."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.check()
            beat()
            try:
                return probe(self.channel)
            except (httpx.HTTPError, ValueError):
                time.sleep(1.0)
        raise ChildEnded(f"{self.child.name} gave no completion within {START_S:.0f} s; see {self.child.log}")
