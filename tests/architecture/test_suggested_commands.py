"""A command that is suggested can be pasted: a path in it is quoted for the shell."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
_COMMAND = re.compile(r"muster [a-z]+ \Z")
#: What is no path: names of commands, recipes and tasks, and words that were quoted before.
_NOT_QUOTED = {"command", "name", "number", "quoted", "target"}


def unquoted(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before = str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            shown = ast.unparse(part.value)
            if (
                _COMMAND.search(before)
                and not shown.startswith("shell_word(")
                and shown not in _NOT_QUOTED
            ):
                found.append(f"line {node.lineno}: {before[-30:]}{{{shown}}}")
            before = ""
    return found


def test_paths_of_suggested_commands_are_quoted() -> None:
    found = [
        f"{path.relative_to(SRC)} {one}"
        for path in sorted(SRC.rglob("*.py"))
        for one in unquoted(path.read_text())
    ]
    assert found == [], "use muster.base.shown_text.shell_word\n" + "\n".join(found)


def test_a_path_that_is_not_quoted_is_found() -> None:
    assert unquoted('f"go on: muster resume {run.path}"') == [
        "line 1: go on: muster resume {run.path}"
    ]
    assert unquoted('f"go on: muster resume {shell_word(run.path)}"') == []
