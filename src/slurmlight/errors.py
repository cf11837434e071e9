"""Errors a person can act on: the command line prints them as one line and exits with 2, never with a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or a bad environment: says what is wrong, and what to do about it.

    ``str(error)`` is one line, "what; do this". ``exit_code`` is what the process should end with.
    """

    exit_code = 2

    def __init__(self, what: str, mend: str = "") -> None:
        self.what = what
        self.mend = mend
        super().__init__(f"{what}; {mend}" if mend else what)


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """The error for a name that is not in a table: nearest valid names first, then all of them."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UserError(f"unknown {kind} '{name}'", f"{hint}valid: {', '.join(names)}")
