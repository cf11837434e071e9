"""Log text -> the first cause: acceptance cases L-01 to L-29, close variants of them, and healthy logs."""

from __future__ import annotations

import pytest

from slurmlight.cluster.failures import Finding, diagnose

SRUN = "srun: error: node01: task 0: Exited with exit code 1"
BAR = "Training Progress:   3%|▎         | 4/125 [06:12<3:02:11, 90.3s/it]"
TRACEBACK = 'Traceback (most recent call last):\n  File "/opt/kit/main.py", line 7, in <module>\n    train()\n'
DUPLICATE = (
    "ray.exceptions.RayTaskError(DistBackendError): ray::WorkerDict.actor_rollout_init_model() (pid=5203, ip=192.0.2.2)\n"
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage\n"
    "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
)
WATCHDOG = (
    "[rank3]:[E1129 18:05:04.408271257 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600004 "
    "milliseconds before timing out."
)


def found(text: str, **given: object) -> Finding:
    finding = diagnose(text, **given)  # type: ignore[arg-type]
    assert finding is not None, "no finding"
    return finding


# id, log, cause, words that the finding (title, evidence or action) must hold, whether coming back can help
CASES = [
    (
        "L-01",
        "slurmstepd: error: *** JOB 32391783 ON node119 CANCELLED AT 2021-06-18T13:05:36 DUE TO PREEMPTION ***",
        "preempted", ["nothing to do"], True,
    ),
    (
        "L-02",
        "slurmstepd-a800-4: error: *** STEP 4.0 ON a800-4 CANCELLED AT 2026-11-29T18:05:04 DUE TO TIME LIMIT ***",
        "time limit", ["--time", "requeue before the limit"], True,
    ),
    (
        "L-03",
        "slurmstepd-a800-1: error: *** JOB 1 ON a800-1 CANCELLED AT 2026-11-29T19:14:06 ***",
        "cancelled by user or administrator", [], False,
    ),
    (
        "L-03-newer",
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-11-29T19:14:06 DUE to SIGNAL Terminated ***",
        "cancelled by user or administrator", [], False,
    ),
    (
        "L-04",
        "slurmstepd: error: *** STEP 63532.0 STEPD TERMINATED ON node106 AT 2023-02-01T10:00:00 DUE TO JOB NOT ENDING WITH "
        "SIGNALS ***",
        "processes would not die", ["node106", "exclude"], True,
    ),
    ("L-05", "srun: error: Node failure on a800-2", "node failure", ["a800-2"], True),
    (
        "L-06", f"{TRACEBACK}KeyError: 'answer'\n{SRUN}", "application error", ["KeyError: 'answer'"], True,
    ),
    (
        "L-07", "srun: error: Unable to create step for job 8: Memory required by task is not available",
        "step asks for more memory than the job has", ["--mem", "ends now"], False,
    ),
    (
        "L-08",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step tasks have been OOM Killed.",
        "host memory", ["--mem", "lower"], True,
    ),
    ("L-09", WATCHDOG, "NCCL timeout", ["stacks", "cap"], True),
    ("two H200s", DUPLICATE, "two ranks on one GPU", ["before Ray"], False),
    (
        "L-10", "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "GPU memory in vLLM sleep/wake", ["/health", "requeue"], True,
    ),
    (
        "L-11",
        "OSError: AF_UNIX path length cannot exceed 107 bytes: '/net/scratch/user1/tmp.t0016/ray/"
        f"session_2025-04-16_17-26-47_592207_2944448/sockets/plasma_store'\n{SRUN}",
        "temp path too long", ["shorter", "AF_UNIX"], False,
    ),
    (
        "L-12",
        "Failed to find a valid port for dashboard after 0 retries: [Errno 98] error while attempting to bind on address "
        "('0.0.0.0', 8265): address already in use",
        "port in use", ["8265"], True,
    ),
    (
        "L-13", "ValueError: Ray component worker_ports is trying to use a port number 53058 that is used by other components.",
        "port ranges overlap", ["53058"], True,
    ),
    (
        "L-14", "Ray runtime started.\n[2026-11-29 18:05:04,123 C 77 77] (raylet) main.cc: Address already in use",
        "port in use", [], True,
    ),
    (
        "L-15", "PermissionError: [Errno 13] Permission denied: '/tmp/ray/ray_current_cluster'",
        "/tmp/ray belongs to another user", ["temp folder"], True,
    ),
    (
        "L-16-libstdc++", "ImportError: /usr/lib64/libstdc++.so.6: version `GLIBCXX_3.4.30' not found",
        "libstdc++ older than the wheel", ["GLIBCXX_3.4.30"], False,
    ),
    (
        "L-16-glibc", "ImportError: /lib64/libc.so.6: version `GLIBC_2.32' not found (required by /v/flash_attn_2_cuda.abi3.so)",
        "glibc older than the wheel", ["GLIBC_2.32"], False,
    ),
    (
        "L-17",
        "ImportError: /v/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
        "flash-attn wheel has the old C++ ABI (cxx11abiFALSE), torch the new one", ["TRUE wheel"], False,
    ),
    (
        "L-18", "AttributeError: Qwen2Tokenizer has no attribute all_special_tokens_extended",
        "transformers 5 with vLLM ≤ 0.11", ["transformers>=4.55.2,<5"], False,
    ),
    (
        "L-19", "AttributeError: '_IncludedRouter' object has no attribute 'path'",
        "fastapi too new for prometheus-fastapi-instrumentator 7", ["0.128.0", "7.1.0", "8.1.0"], False,
    ),
    (
        "L-20", "AttributeError: 'LoRAConfig' object has no attribute 'lora_extra_vocab_size'",
        "verl and vLLM versions disagree on LoRA", ["LoRA off"], False,
    ),
    (
        "L-21",
        "2026-11-29 18:05:04 OSError: [Errno 122] Disk quota exceeded: '/ckpt/latest_checkpointed_iteration.txt'\n"
        f"2026-11-29 18:35:04 {WATCHDOG}\n{SRUN}",
        "quota", ["free space", "Errno 122"], False,
    ),
    (
        "L-22", "slurmstepd: error: pyxis: ERROR File already exists: /run/enroot/user-1001/pyxis_4567.0",
        "container name reused after requeue", ["attempt number"], True,
    ),
    (
        "L-23",
        f"2026-11-29 18:00:00 {BAR}\n"
        + "".join(f"2026-11-29 18:{m}:00 Requeuing task rollout-7f3a after timeout (attempt 1)\n" for m in (10, 20, 30)),
        "rollouts stall", ["0.1 a minute"], True,
    ),
    (
        "L-24", "Training Progress:   0%|          | 0/125 [44:45<?, ?it/s]", "no first step", [], True,
    ),
    (
        "L-25",
        "SLURM_JOB_NODELIST=a800-[1-2]\nnode a800-1 joined\nValueError: Total available GPUs 8.0 is less than total desired GPUs 16",
        "Ray sees fewer GPUs than the preset wants", ["8.0 of 16", "a800-2"], True,
    ),
    (
        "L-26",
        "ValueError: Free memory on device cuda:3 (12.05/79.15 GiB) on startup is less than desired GPU memory utilization "
        "(0.8, 63.32 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "GPU is occupied", ["GPU 3", "wait until", "exclude"], True,
    ),
    ("L-27", "RuntimeError: Server did not start up within 0.10 seconds.", "store port taken", ["4747"], True),
    (
        "L-28", "FileNotFoundError: [Errno 2] No such file or directory: 'scontrol'",
        "scontrol called inside the container", ["host side"], False,
    ),
    (
        "kit-worker",
        f"{BAR}\nslurmlight: the vLLM worker failed in execute_model: RuntimeError: no kernel; start the run again, it resumes",
        "a vLLM worker failed", ["execute_model: RuntimeError: no kernel"], True,
    ),
    (
        "kit-process", f"{BAR}\nslurmlight: the LLM proxy was killed by SIGKILL; see /run/proxy.log; start the run again",
        "a process that the run needs died", ["LLM proxy was killed by SIGKILL"], True,
    ),
    (
        "kit-episodes", f"{BAR}\nslurmlight: 9 of 16 episodes failed, the first: UserError: no database",
        "too many episodes failed", ["UserError: no database"], True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("log", "cause", "words", "requeue"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_cause(log: str, cause: str, words: list[str], requeue: bool) -> None:
    finding = found(log)
    assert finding.cause == cause
    said = f"{finding.title}\n{finding.evidence}\n{finding.action}"
    assert [word for word in words if word not in said] == []
    assert finding.requeue is requeue
    assert finding.evidence in log


HEALTHY = {
    "L-29-progress": BAR,
    "L-29-sigcont": "submitit WARNING (2026-11-29 18:05:04,123) - Bypassing signal SIGCONT",
    "L-29-agentops": "🖇 AgentOps: Error setting up OpenAI streaming wrappers: No module named 'openai.resources.beta.chat'",
    "L-24-early": "Training Progress:   0%|          | 0/125 [04:45<?, ?it/s]",
    "empty": "",
    "one-rollout-late": f"{BAR}\nRequeuing task rollout-7f3a after timeout (attempt 1)\n",
    "loading": "Loading safetensors checkpoint shards:   0% Completed | 0/4 [59:59<?, ?it/s]\n",
    "vllm-other-port": "INFO 11-29 18:05:04 [utils.py:12] Port 8000 is already in use, trying port 8001",
    "verl-config": "{'actor_rollout_ref': {'rollout': {'gpu_memory_utilization': 0.6, 'free_cache_engine': True}}}",
    "exit-zero": "srun: error: node01: task 0: Exited with exit code 0",
    "ignored-at-exit": f"Exception ignored in: <function Pool.__del__ at 0x7f>\n{TRACEBACK}ImportError: sys.meta_path is None",
    "outlived": (
        f"Training Progress:   3%|▎  | 4/125 [06:12<3:02:11, 90.3s/it]\n2026-11-29 18:05:04 ERROR rollout failed\n{TRACEBACK}"
        "sqlite3.OperationalError: no such column: x\n"
        "Training Progress:   5%|▎  | 6/125 [09:12<3:02:11, 90.3s/it]\n"
    ),
    "outlived-port": f"step: 3\n[Errno 98] error while attempting to bind on address ('0.0.0.0', 8265): address already in use\n{BAR}"
    "\nstep: 5",
    "earlier-attempt-of-the-kit": f"=== slurmlight attempt 1 ===\n{WATCHDOG}\n{SRUN}\n=== slurmlight attempt 2 ===\n{BAR}",
    "the-kit-quotes": f"=== slurmlight attempt 2 ===\n[start] +0.1 s: attempt 1 ended by: {WATCHDOG}\n{BAR}",
}


@pytest.mark.parametrize("log", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy(log: str) -> None:
    assert diagnose(log) is None
