"""Run while an image is built: import what it must hold, then print what it holds. python image_facts.py STACK MODULE ..."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path


def facts(stack: str) -> dict[str, object]:
    lock = Path(sys.prefix, "requirements.lock").read_bytes()
    versions = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {
        "stack": stack,
        "python": platform.python_version(),
        "lock_sha256": hashlib.sha256(lock).hexdigest(),
        "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "packages": dict(sorted(versions.items())),
    }


if __name__ == "__main__":
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except Exception as error:
            sys.exit(f"image_facts: import {name} failed: {type(error).__name__}: {error}")
    print(json.dumps(facts(sys.argv[1]), indent=1))
