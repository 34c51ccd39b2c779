"""How a run was set up: command, code, environment, options and where they come from, plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args, get_type_hints

from muster.api.report.about import environment_blocks, setting_blocks, time_facts
from muster.api.report.content import flat
from muster.api.start.options import GangOptions, SweepOptions
from muster.api.sweeps.adding import shown_additions
from muster.base.codec import read_json
from muster.base.errors import MusterError
from muster.base.flags import Flag, kind_of_word
from muster.base.shown_text import command_line, hide_secrets
from muster.run.record import RunRecord, plain_options
from muster.web.content.plain import block, finite, line, plain, settings
from muster.web.folder import Folder
from muster.web.query import Query

_MOST_FINDINGS, _MOST_CODE = 200, 4 * 2**20


def content(folder: Folder, query: Query) -> dict[str, Any]:
    stored = folder.run.stored
    spec = {name: value for name, value in stored.spec.items() if name != "program"}
    added = shown_additions(folder.folder)
    blocks = [
        *setting_blocks({"What was run": {**(spec or stored.spec), **added}}),
        *environment_blocks(stored, {})[2:],
        time_facts(folder.folder),
    ]
    return {
        "command": line(command_line(stored.argv), 5000),
        "cwd": line(stored.cwd),
        "created": stored.created_s,
        "code": [
            {"name": line(name), "hash": digest, "since": _since(Path(stored.cwd), name, digest)}
            for name, digest in stored.code.items()
            if digest
        ],
        "environment": settings(stored.environment),
        "options": options(stored),
        "doctor": _verified(folder.folder.verify_json),
        "plan": _compared(folder.folder.plan_error_json) or _planned(folder.folder.plan_json),
        "blocks": [block(one) for one in blocks if one is not None],
    }


def _since(cwd: Path, name: str, digest: str) -> str:
    """Whether a file is still what the run began with; "" for what is not found where it began."""
    path = cwd / name
    with suppress(OSError, ValueError):
        if ".." not in path.parts and 0 < path.stat().st_size <= _MOST_CODE and path.is_file():
            same = sha256(path.read_bytes()).hexdigest() == digest
            return "unchanged" if same else "changed since"
    return ""


def _flags(kind: type, before: str = "") -> dict[str, set[str]]:
    """The flags of each field of an options dataclass, with their aliases, and of those in it."""
    found: dict[str, set[str]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Flag)]
        mark = marks[0] if marks else Flag()
        others = [one if isinstance(one, str) else one.name for one in mark.aliases]
        names = [mark.name or name.replace("_", "-"), *others]
        found[before + name] = {f"--{no}{one}" for one in names for no in ("", "no-")}
        inner = [hint, *get_args(hint), *(deep for one in get_args(hint) for deep in get_args(one))]
        for one in inner:
            if isinstance(one, type) and is_dataclass(one):
                found |= _flags(one, f"{before}{name}.")
    return found


def options(stored: RunRecord) -> list[dict[str, Any]]:
    """Each option with its value and its origin: the command line, the call or recipe that chose
    it, or the default."""
    kind: type = GangOptions if stored.is_gang else SweepOptions
    default, flags = dict(flat("", plain_options(kind()))), _flags(kind)
    words = {word.partition("=")[0] for word in stored.argv if kind_of_word(word) == "flag"}
    found = []
    for name, value in flat("", hide_secrets(stored.options)):
        if words & flags.get(name, set()):
            origin = "command line"
        else:
            origin = "default" if default.get(name, value) == value else "call or recipe"
        found.append({"name": line(name), "value": plain(value), "origin": origin})
    order = ("command line", "call or recipe", "default")
    return sorted(found, key=lambda one: order.index(one["origin"]))


def _compared(path: Path) -> list[dict[str, Any]]:
    """What was predicted beside what the run took; empty where nothing was, or nothing ended."""
    lines = _object(path).get("lines")
    return [
        {
            "name": line(str(one.get("name"))),
            "unit": line(str(one.get("unit", ""))),
            "origin": line(str(one.get("origin", ""))),
            **{name: finite(one.get(name)) for name in ("predicted", "measured", "error")},
        }
        for one in (lines if isinstance(lines, list) else ())
        if isinstance(one, Mapping)
    ]


def _planned(path: Path) -> list[dict[str, Any]]:
    """What `muster plan` has predicted for a run that has not ended, by number of devices."""
    rows = _object(path).get("predictions")
    return [
        {"devices": plain(one.get("num_devices")), "name": line(name), "predicted": plain(value)}
        for one in (rows if isinstance(rows, list) else ())
        if isinstance(one, Mapping)
        for name, value in flat("", {k: v for k, v in one.items() if k != "num_devices"})
        if value is not None
    ][:_MOST_FINDINGS]


def _verified(path: Path) -> list[dict[str, Any]]:
    """What `muster verify` has found: a row for each finding."""
    found = None
    with suppress(MusterError):
        found = read_json(path, path.name)
    rows = found if isinstance(found, list) else []
    return [
        {line(str(name)): plain(value) for name, value in hide_secrets(one).items()}
        for one in rows[:_MOST_FINDINGS]
        if isinstance(one, Mapping)
    ]


def _object(path: Path) -> Mapping[str, Any]:
    with suppress(MusterError):
        found = read_json(path, path.name)
        return found if isinstance(found, Mapping) else {}
    return {}
