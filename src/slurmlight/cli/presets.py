"""slurmlight presets: the presets there are, and every key of one with its value, default and meaning."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("presets")(show)


def show(
    name: Annotated[str | None, typer.Argument(help="a preset or a TOML file; without it, the list of presets")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="every key there is, as docs/presets.md has it")] = False,
) -> None:
    """List the presets, or print one in full as TOML: every key, its value and meaning."""
    import json
    from dataclasses import asdict

    from slurmlight import presets
    from slurmlight.presets.describe import keys, value

    if markdown:
        typer.echo(_markdown())
    elif name is None:
        about = {one: presets.load(one).about for one in presets.names()}
        typer.echo(json.dumps(about, indent=1) if as_json else "\n".join(f"{one:<14}{text}" for one, text in about.items()))
    elif as_json:
        preset = presets.load(name)
        typer.echo(json.dumps([asdict(key) | {"value": value(preset, key.name)} for key in keys()], indent=1))
    else:
        typer.echo(_toml(presets.load(name)))


def _toml(preset: Any) -> str:
    """``preset`` in full as TOML with a comment a line, to read or to start a file of one's own from."""
    import json

    from slurmlight.presets.describe import keys, value

    lines: list[str] = []
    section = ""
    for key in (key for key in keys() if key.name != "verl" and "[]" not in key.name):
        here, _, leaf = key.name.rpartition(".")
        if value(preset, here or "name") is None:
            continue
        if here != section:
            section = here
            lines += ["", f"[{section}]"]
        found = value(preset, key.name)
        default = "" if key.required or found == key.default else f" (default {_short(key.default)})"
        line = f"# {leaf} = none" if found is None else f"{leaf} = {_toml_value(found)}"
        lines.append(f"{line:<45} # {key.about}{default}")
    if preset.verl:
        lines += ["", "[verl]", *(f"{json.dumps(name)} = {_toml_value(found)}" for name, found in preset.verl.items())]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """JSON is TOML too, but for tables."""
    import json

    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value)


def _markdown() -> str:
    from slurmlight.presets.describe import keys

    lines = [
        "# Keys of a preset",
        "",
        "Written by `slurmlight presets --markdown > docs/presets.md`. Set a key with `--set key=value`, or in a TOML file",
        'whose first line is `base = "qwen"`; `slurmlight presets qwen` prints the values of a preset. [verl] is the meaning',
        "in verl 0.5 to 0.9, [spider] the documented 4 x A800 Spider run, [kit] this project's own choice.",
        "Relative paths, and every command's `data/`, `models/` and `checkpoints/`, are under the folder that the environment",
        "variable `SLURMLIGHT_HOME` names (unset: the current folder).",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key in keys():
        default = "required" if key.required else f"`{_short(key.default)}`"
        cells = (f"`{key.name}`", key.kind, default, key.about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    import json

    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value)
