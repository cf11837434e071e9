"""Secrets stay in the environment: which names are secret, which are handed to the job by name, and redaction of text.

Everything that prints or logs text of foreign origin (job scripts, configurations, log lines, errors) sends it through
``redact``. Standard library only.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"

# A word at the end tells (HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD); TOKENIZERS_PARALLELISM or MAX_TOKENS do not match.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:KEY|TOKEN|PASS|PWD|AUTH|JWT|COOKIE)$|(?:APIKEY|PASSWORD|PASSWD|PASSPHRASE)$"
    r"|(?:^|_)(?:SECRETS?|PASSWORD|CREDENTIALS?|AUTHORIZATION|WEBHOOK)(?:_|$)|^DOCKER_AUTH_CONFIG$"
)
_HARMLESS_NAME = re.compile(r"^(?:OLD)?PWD$|_(?:FILE|PATH|DIR|SOCK|ID|NAME)$|(?:^|_)(?:EOS|BOS|PAD|UNK|SEP|CLS|MASK)_TOKEN$")
_HARMLESS_VALUE = re.compile(r"^(?:true|false|yes|no|on|off|none|null|\d{1,5})$", re.IGNORECASE)

# scheme://user:password@host; with http(s) a user alone may be a token. Greedy: a password may hold an @.
# docker://image:tag@sha256:... is no user.
_URL_USER = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)(?P<user>[^\s/?#\"'<>]*)@(?!sha256:)")
_ASSIGNED = re.compile(
    r"(?P<name>\b[A-Za-z][A-Za-z0-9_]*+)(?P<sep>[\"']?\s*[=:]\s*[\"']?)(?P<value>(?:Bearer |Basic )?[^\s\"',;)}\]]+)"
)
_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)

# What a job needs of the submitter's environment, secret or not; the job script holds these names, never their values.
_FORWARDED = (
    *("HF_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "SWANLAB_*", "WANDB_*", "OPENAI_*", "SLURMLIGHT_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "VLLM_*", "TORCH_*", "PYTORCH_*", "CUDA_*", "OMP_NUM_THREADS", "RAY_*", "VERL_*"),
    *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "LANG", "LC_*", "TZ"),
)


def is_secret_name(name: str) -> bool:
    """Whether the value of an environment variable (or a configuration key) of this name is a secret."""
    upper = name.upper()
    return bool(_SECRET_NAME.search(upper)) and not _HARMLESS_NAME.search(upper)


def forwarded_names(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names in ``environment`` (default: this process's) that a job is given, sorted: those of the tools a job runs,
    plus what the user lists in SLURMLIGHT_FORWARD (names or patterns with ``*``, separated by commas)."""
    env = os.environ if environment is None else environment
    patterns = (*_FORWARDED, *(part.strip() for part in env.get("SLURMLIGHT_FORWARD", "").split(",") if part.strip()))
    return tuple(sorted(name for name in env if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """``text`` with every secret replaced by ``***``.

    Secrets are the values of secret names in ``environment`` (default: this process's), also quoted, escaped or cut into
    lines; users and passwords inside URLs; values assigned to secret names in the text; strings shaped like known tokens.
    """
    values = _values(os.environ if environment is None else environment)
    for value in sorted(values, key=len, reverse=True):
        # a short value must stand alone: the password "pass" must not turn "passed" into "***ed"
        edge = (r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])") if len(value) < 8 else ("", "")
        text = re.sub(edge[0] + re.escape(value) + edge[1], MASK, text)
    text = _URL_USER.sub(_mask_user, text)
    text = _ASSIGNED.sub(_mask_assigned, text)
    return _SHAPE.sub(MASK, text)


def masked(value: Any) -> Any:
    """``value`` (as JSON has it) with every text in it redacted, keys left alone."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: masked(item) for key, item in value.items()}
    return [masked(item) for item in value] if isinstance(value, list | tuple) else value


def _values(environment: Mapping[str, str]) -> set[str]:
    found: set[str] = set()
    for name, value in environment.items():
        if is_secret_name(name):
            for part in (value, *value.splitlines()):
                found |= _spellings(part.strip())
        elif "://" in value and (match := re.search(r"://(.+)@", value)):
            found |= _spellings(match[1])
    return {value for value in found if len(value) >= 4 and not _HARMLESS_VALUE.match(value)}


def _spellings(value: str) -> set[str]:
    """The ways a value may stand in a script, a JSON or Python text, or a URL."""
    return {value, json.dumps(value)[1:-1], repr(value)[1:-1], shlex.quote(value), quote(value, safe="")}


def _mask_user(match: re.Match[str]) -> str:
    user = match["user"]
    secret = bool(user) and (":" in user or match["scheme"].lower().startswith("http"))
    return f"{match['scheme']}{MASK}@" if secret else match[0]


def _mask_assigned(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    word = name.upper() in ("KEY", "TOKEN", "PASS", "AUTH")  # "key=value" and "token: 5" are ordinary words
    if word or not is_secret_name(name) or value.startswith(("$", MASK)) or _HARMLESS_VALUE.match(value):
        return match[0]
    return f"{name}{match['sep']}{MASK}"
