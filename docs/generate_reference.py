"""Writes docs/reference/cli.md from the help of the commands themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from muster.cli.main import COMMANDS
from muster.cli.recipes import AGENTS, RECIPES, TASKS

TARGET = Path(__file__).parent / "reference" / "cli.md"

HEAD = """# Commands and flags

Made by `python docs/generate_reference.py` from what the commands say themselves; a test compares.
Hyphens and underscores in flags mean the same.

Exit codes of every command: 0 all good, 1 some tasks failed, 2 wrong usage, 3 the set-up is
broken, 75 saved and asking to be started again, 130 interrupted.
"""


def help_of(*words: str) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "muster", *words, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def main() -> None:
    parts = [HEAD]
    for name, (_, text) in COMMANDS.items():
        parts.append(f"## muster {name}\n\n{text[0].upper()}{text[1:]}.\n")
        parts.append(f"```text\n{help_of(name)}\n```\n")
    for name in RECIPES:
        parts.append(f"## Recipe {name}\n\n```text\n{help_of('sweep', name)}\n```\n")
    for name in (*TASKS, *AGENTS):
        parts.append(f"## Training {name}\n\n```text\n{help_of('train', name)}\n```\n")
    page = "\n".join(parts)
    if "--stdout" in sys.argv:
        sys.stdout.write(page)
        return
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page)


if __name__ == "__main__":
    main()
