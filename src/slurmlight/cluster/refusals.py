"""Slurm's words when it refuses a job -> one error with what to change. Pure."""

from __future__ import annotations

import re

from slurmlight.errors import UserError


class SubmitRefused(UserError):
    """Slurm will not take this job as it is. Nothing was submitted."""


# Slurm 22.05's texts (slurm_errno.c, sbatch's option parser) -> what a person changes; the first that matches counts.
_MEND = (
    (r"invalid partition", "choose a partition that exists"),
    (r"invalid account|account.*partition combination", "check --account (sacctmgr show assoc user=$USER lists yours)"),
    (
        r"accounting/qos policy|association",
        "you are at a limit of your account or QOS: wait, ask for less, or ask your administrator",
    ),
    (r"invalid qos", "check --qos (sacctmgr show qos lists them)"),
    (r"access/permission|not permitted to use this partition", "ask for access, or choose another partition"),
    (r"--time|time limit|time specification", "check --time against the partition's MaxTime (sinfo -o '%P %l')"),
    (r"generic resource|gres", "check --gpus and the GPU type against the partition (sinfo -o '%P %G')"),
    (r"memory", "lower --mem to what a node has (sinfo -o '%P %m')"),
    (r"feature", "check --constraint (sinfo -o '%P %f')"),
    (r"invalid node name|node name specified", "check --exclude (sinfo -N)"),
    (r"node configuration|node count|too many|more processors", "ask for what a node has (sinfo -o '%P %D %c %m %G')"),
    (r"dependency", "check --dependency: the job it names must be known to Slurm"),
)


def refusal(stderr: str, partitions: str = "") -> SubmitRefused:
    """The error for what sbatch said; ``partitions`` are those that exist, for a wrong partition."""
    lines = [re.sub(r"^sbatch: (error: )?(Batch job submission failed: )?", "", line).strip() for line in stderr.splitlines()]
    words = "; ".join(dict.fromkeys(line for line in lines if line)) or "no reason given"
    mend = next((mend for pattern, mend in _MEND if re.search(pattern, words, re.IGNORECASE)), "change that and submit again")
    if partitions and "partition" in mend and "exists" in mend:
        mend += f": {partitions}"
    return SubmitRefused(f"Slurm refuses the job: {words}", mend)
