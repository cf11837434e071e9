#!/usr/bin/env python3
"""The front door: ``python launch.py --preset qwen --partition a800``, ``python launch.py --preset tiny``.

Started by any Python 3.8+, it runs again in .venv, where ``slurmlight launch`` is the same thing.
"""

import os
import sys


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    python = os.path.join(here, ".venv", "bin", "python")
    if os.path.realpath(sys.prefix) != os.path.realpath(os.path.join(here, ".venv")):
        if not os.path.exists(os.path.join(here, ".venv", ".setup")):
            sys.exit(f"slurmlight: .venv is missing or unfinished; make it with: make -C {here} setup")
        os.execv(python, [python, os.path.join(here, "launch.py"), *sys.argv[1:]])
    from slurmlight.cli import main as run

    run(sys.argv[1:], command="launch")


if __name__ == "__main__":
    main()
