"""What differs between two specifications of a sweep, in lines for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two specifications, one sentence each; empty when nothing did."""
    return changed_lines(_flat(old), _flat(new))


def changed_lines(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]


def _flat(spec: Mapping[str, Any]) -> dict[str, str]:
    """Each entry of a specification as one line: name -> text."""
    lines: dict[str, str] = {}
    for part, content in spec.items():
        if part in ("grid", "zip"):
            for name, values in content.items():
                lines[f"{part} {name}"] = _line(values)
        elif part == "list":
            names = ", ".join(content["names"])
            lines[part] = (
                f"{content['source']} ({content['rows']} rows of {names}; "
                f"sha256 {content['sha256'][:12]})"
            )
        else:
            lines[part] = content if isinstance(content, str) else json.dumps(content)
    return lines


def _line(values: Any) -> str:
    if isinstance(values, list):
        return ", ".join(map(str, values))
    count, first, last = values["count"], values["first"], values["last"]
    return f"{count} values, {first} ... {last} (sha256 {values['sha256'][:12]})"
