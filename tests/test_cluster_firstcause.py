"""The first cause in logs as they really are: several failures, attempts, ranks, colours, junk; spellings of other versions."""

from __future__ import annotations

import random

import pytest

from slurmlight.cluster.failures import adjusted, diagnose
from slurmlight.cluster.fingerprints import Rule, table
from tests.test_cluster_failures import BAR, CASES, HEALTHY, SRUN, TRACEBACK, WATCHDOG, found

FIRST_CAUSE = {
    "quota-before-nccl": (f"OSError: [Errno 122] Disk quota exceeded\n{WATCHDOG}", "quota"),
    "error-before-nccl": (
        f"[rank1]: {TRACEBACK.replace(chr(10), chr(10) + '[rank1]: ')}ValueError: nan\n{WATCHDOG}",
        "application error",
    ),
    "nccl-before-node-failure": (f"{WATCHDOG}\nsrun: error: Node failure on a800-2", "node failure"),
    "nccl-before-oom": (f"{WATCHDOG}\nslurmstepd: error: Detected 2 oom-kill event(s) in StepId=9.0.", "host memory"),
    "nccl-before-limit": (
        f"{WATCHDOG}\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-29T18:05:04 DUE TO TIME LIMIT ***",
        "NCCL timeout",
    ),
    "preempted-before-tracebacks": (
        "slurmstepd: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-11-29T18:05:04 DUE TO PREEMPTION ***\n"
        f"{TRACEBACK}KeyboardInterrupt\n{SRUN}",
        "preempted",
    ),
    "srun-ends-the-others": (
        f"{TRACEBACK}RuntimeError: boom\n{SRUN}\nslurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-29T18:05:04 ***",
        "application error",
    ),
    "would-not-die-after-limit": (
        "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-29T18:05:04 DUE TO TIME LIMIT ***\n"
        "slurmstepd: error: *** STEP 4.0 STEPD TERMINATED ON n1 AT 2026-11-29T18:08:04 DUE TO JOB NOT ENDING WITH SIGNALS ***",
        "time limit",
    ),
    "last-attempt-of-the-kit": (
        f"=== slurmlight attempt 1 ===\n{WATCHDOG}\n=== slurmlight attempt 12 ===\n{TRACEBACK}OSError: [Errno 28] No space left "
        "on device",
        "disk full",
    ),
    "last-attempt-by-time": (
        "slurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-29T18:05:04 DUE TO PREEMPTION ***\n"
        "2026-11-29 18:05:20 saved\n2026-11-29 18:07:30 hello again\n[Errno 122] Disk quota exceeded",
        "quota",
    ),
    "last-attempt-by-slurm": (
        "[Errno 122] Disk quota exceeded\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-29T18:05:04 DUE TO JOB REQUEUE "
        "***\nhello\nslurmstepd: error: *** JOB 4 ON n1 CANCELLED AT 2026-11-29T19:05:04 DUE TO PREEMPTION ***",
        "preempted",
    ),
}


@pytest.mark.parametrize(("log", "cause"), FIRST_CAUSE.values(), ids=FIRST_CAUSE.keys())
def test_first_cause(log: str, cause: str) -> None:
    assert found(log).cause == cause


def coloured(line: str) -> str:
    return f"\x1b[36m(WorkerDict pid=2944448, ip=10.0.0.7)\x1b[0m \x1b[31m{line}\x1b[0m"


WRAPPINGS = {
    "colours": lambda log: "\n".join(map(coloured, log.splitlines())),
    "after-a-bar": lambda log: f"Training Progress:  1%|  | 1/125 [01:30<3:06:00]\r{BAR}\r" + log,
    "windows": lambda log: log.replace("\n", "\r\n"),
    "junk-before": lambda log: random.Random(0).randbytes(5000).decode(errors="replace") + "\n" + log,
    "ordinary-before": lambda log: "".join(f"step:{n} - actor/loss:0.1 - reward:0.5\n" for n in range(1, 90)) + log,
    "loading-after": lambda log: log + "\nLoading checkpoint shards: 100%|██| 4/4 [00:05<00:00, 1.2s/it]\n",
    "third-attempt": lambda log: f"{HEALTHY['L-29-progress']}\n=== slurmlight attempt 3 ===\n[preflight] +0.0 s\n{log}",
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_cause_in_real_surroundings(wrap) -> None:
    # L-23 and L-24 tell of waiting: steps before them change the story
    causes = {case[0]: (found(wrap(case[1])).cause, case[2]) for case in CASES if case[0] not in ("L-23", "L-24")}
    assert {name: pair for name, pair in causes.items() if pair[0] != pair[1]} == {}


VARIANTS = [
    ("CUDA Error: out of memory at /build/vllm/csrc/cumem_allocator.cpp:139", "GPU memory in vLLM sleep/wake"),
    ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=_ALLGATHER_BASE) ran for 1800441 milliseconds", "NCCL timeout"),
    ("OSError: AF_UNIX path too long", "temp path too long"),
    ("OSError: [Errno 98] Address already in use", "port in use"),
    ("RuntimeError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE", "port in use"),
    ("/lib/x86_64-linux-gnu/libstdc++.so.6: version ‘GLIBCXX_3.4.32’ not found (required by /v/_C.so)", "libstdc++ older than the wheel"),
    ("libm.so.6: version 'GLIBC_2.38' not found", "glibc older than the wheel"),
    (
        "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "flash-attn wheel has the new C++ ABI (cxx11abiTRUE), torch the old one",
    ),
    ("flash_attn_2_cuda.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa", "flash-attn wheel does not fit this torch"),
    ("AttributeError: TokenizersBackend has no attribute all_special_tokens_extended. Did you mean", "transformers 5 with vLLM ≤ 0.11"),
    ("scontrol: command not found", "scontrol called inside the container"),
    ("[ERROR] enroot: File already exists: /run/enroot/user-7/pyxis_kit", "container name reused after requeue"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB", "GPU memory"),
    ("ValueError: Free memory on device (3.2/79.2 GiB) on startup is less than desired GPU memory utilization (0.6", "GPU is occupied"),
    ("RuntimeError: Server did not start up within 60.00 seconds.", "store port taken"),
    ("srun: error: n7: task 3: Segmentation fault (core dumped)", "crashed in compiled code"),
    ("srun: error: n7: tasks 0-3: Killed", "killed from outside"),
    ("srun: error: Orion-18-69: task 289: Bus error", "crashed in compiled code"),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in step 349.0 cgroup. Some of your processes may have been killed", "host memory"),
    ("RuntimeError: Server failed to start within the 10 seconds.", "store port taken"),
    ("ValueError: Failed to bind to 0.0.0.0:8265 because it's already occupied. You can use `ray start", "port in use"),
    ("[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", "port in use"),
    ("[36m(TaskRunner pid=7)[0m OSError: AF_UNIX path too long", "temp path too long"),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "peers did not meet at the start"),
    ("slurmstepd: error: pyxis: failed to import docker image\nslurmstepd: error: pyxis: Write failed because No space left on device", "disk full"),
    (f"{TRACEBACK}KeyboardInterrupt", "interrupted"),
    (f"RuntimeError: nope\n{SRUN}", "application error"),
    ("Requeuing task r-1 after timeout (attempt 1)\nRequeuing task r-1 after timeout (attempt 2)", "rollouts stall"),
    ("srun: error: n7: task 3: Out Of Memory", "host memory"),
]  # fmt: skip


@pytest.mark.parametrize(("log", "cause"), VARIANTS)
def test_variants(log: str, cause: str) -> None:
    assert found(log).cause == cause


def test_traceback_of_one_rank_is_not_mixed_with_anothers() -> None:
    log = (
        "[rank0]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
        '[rank0]:   File "a.py", line 1\n[rank1]:   File "a.py", line 1\n[rank1]: ValueError: one\n[rank0]: ValueError: zero\n'
    )
    assert found(f"{log}{SRUN}").evidence == "ValueError: zero"


def test_traceback_with_times_before_each_line() -> None:
    lines = [*TRACEBACK.splitlines(), "RuntimeError: nope"]
    log = "\n".join(f"2026-11-29T18:05:04.{n}Z {line}" for n, line in enumerate(lines))
    assert found(log).evidence == "RuntimeError: nope"


def test_error_without_its_traceback() -> None:
    assert found(f"RuntimeError: nope\nbye\n{SRUN}").evidence == "RuntimeError: nope"


def test_port_is_that_of_the_address() -> None:
    log = "[W socket.cpp:4640] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
    assert found(log).detail == "port 29500"


def test_logged_traceback_in_a_running_log_is_no_end() -> None:
    log = f"2026-11-29 18:05:04 WARNING query failed\n{TRACEBACK}sqlite3.OperationalError: no such column: x\n"
    assert diagnose(log + "".join(f"2026-11-29 18:06:{n} INFO rollout {n} done\n" for n in range(10, 20))) is None


def test_chain_of_exceptions_ends_in_its_last_line() -> None:
    chain = f"{TRACEBACK}KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    assert found(f"{chain}RuntimeError: no answer\n{SRUN}").evidence == "RuntimeError: no answer"


def test_first_step_deadline_is_the_callers() -> None:
    bar = "Training Progress:   0%|          | 0/125 [04:45<?, ?it/s]"
    assert found(bar, first_step_s=200).cause == "no first step"
    assert diagnose(bar, first_step_s=300) is None


def test_missing_nodes_are_the_jobs() -> None:
    log = "a800-1: joined\nValueError: Total available GPUs 4.0 is less than total desired GPUs 12"
    assert "a800-2, a800-11" in found(log, nodes=("a800-1", "a800-2", "a800-11")).action


def test_wake_up_out_of_memory_lowers_the_share() -> None:
    adjust = found(CASES[[case[0] for case in CASES].index("L-10")][1]).adjust
    assert adjust == {"actor_rollout_ref.rollout.gpu_memory_utilization": -0.05}
    assert [adjusted(0.6, -0.05), adjusted(0.42, -0.05), adjusted(0.4, -0.05)] == [0.55, 0.4, 0.4]


def test_line_numbers_count_from_one() -> None:
    assert found(f"hello\n\n{WATCHDOG}").line == 3
    assert found(f"x\n=== slurmlight attempt 4 ===\n{WATCHDOG}").line == 3
    assert found(f"x\n=== slurmlight attempt 4 ===\n{WATCHDOG}").attempt == 4


@pytest.mark.parametrize("rule", table(), ids=lambda rule: rule.cause)
def test_rule_is_complete(rule: Rule) -> None:
    assert rule.cause and rule.action
    # the quick look must not pass over a match: every fingerprint has a literal, and it stands in its own pattern
    for one in rule.any:
        assert len(one.literal) >= 4
        assert one.literal in one.pattern.pattern.lower()


def test_junk_is_quick_and_finds_nothing() -> None:
    assert diagnose(random.Random(1).randbytes(2_000_000).decode("latin-1").replace("\n", " ")) is None
