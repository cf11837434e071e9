"""A reward of one's own: a function in a Python file, looked at before anything is submitted and tried before training."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmlight.errors import UserError

_MEND = "write it as: def {name}(judged): return a number from -1 to 1"


def look_at(path: Path, name: str) -> None:
    """Raises UserError where ``path`` is no Python file with a function ``name`` of one argument. Runs nothing of it."""
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(f"reward '{name}': {path} cannot be read ({why})", "give the path of a Python file") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"reward '{name}': {path} is not Python ({error})", "correct that line") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        there = f" (has: {', '.join(sorted(functions))})" if functions else ""
        raise UserError(f"reward '{name}': {path} has no function of that name{there}", _MEND.format(name=name))
    arguments = functions[name].args
    needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    if needed > 1 or not (arguments.posonlyargs or arguments.args or arguments.vararg):
        raise UserError(f"reward '{name}' in {path} must take one argument", _MEND.format(name=name))


def load(path: Path, name: str) -> Callable[[Any], Any]:
    """The function itself. Raises UserError where the file cannot be run."""
    look_at(path, name)
    spec = importlib.util.spec_from_file_location(f"slurmlight_user_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:  # whatever a person's file does on import
        raise UserError(f"reward '{name}': {path} fails ({type(error).__name__}: {error})", "correct the file") from None
