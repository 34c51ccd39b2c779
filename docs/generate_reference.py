"""Writes docs/reference: cli.md from the help of the commands themselves, files.md from the module
that names the files of a run, and the schema of experiment files from their dataclasses.

A flag that several commands share is printed once; a command names the group that it is in, and
prints what is different there.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

os.environ.update(COLUMNS="100", NO_COLOR="1", TERM="dumb")

from experiment_schema import experiment_schema

import muster.run.folder
from muster.cli.main import COMMANDS
from muster.cli.main import main as run_command
from muster.cli.recipes import AGENTS, MAPS, RECIPES, TASKS

TARGET = Path(__file__).parent / "reference"

HEAD = """# Commands and flags

Made by `python docs/generate_reference.py` from what the commands say themselves; a test compares.
Hyphens and underscores in flags mean the same. Groups of flags that several commands have are
printed once, where they come first; `muster COMMAND --help-all` shows all flags of a command.

Exit codes of every command: 0 all good, 1 some tasks failed, 2 wrong usage, 3 the set-up is
broken, 75 saved and asking to be started again, 130 interrupted.
"""
FILES = """# Files of a run

Made by `python docs/generate_reference.py` from the module that names them; a test compares.
Everything of a run is in its folder, so a run is copied, moved, sent and removed as folders are.
`muster status`, `why`, `logs`, `metrics` and `web` only read it.

```text
{tree}
```

Where the ledger works on a local disk, that is in `~/.local/state/muster-<uid>`,
`/var/tmp/muster-<uid>` or below [`MUSTER_LEDGER_DIR`](environment.md). What a command leaves in the
folder of its task as `result.json`, a JSON object, is the result of the task. What the files of a
training hold is on [its page](../train.md#the-run-folder).
"""
_TITLE = re.compile(r"^\S.*:$")

#: A group's title → the command that has printed it, and its entries by flag.
Printed = dict[str, tuple[str, dict[str, str]]]


def help_of(words: str) -> str:
    shown = io.StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        run_command([*words.split(), "--help-all"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines())


def section(words: str, printed: Printed) -> str:
    """The help of a command, less the flags that an earlier one has printed in the same words."""
    head: list[str] = []
    groups: list[str] = []
    for block in help_of(words).split("\n\n"):
        title, _, rest = block.partition("\n")
        entries = entries_of(rest) if _TITLE.match(title) else {}
        if not any(flag.startswith(("--", "[", "-")) or flag.isupper() for flag in entries):
            head.append(block)
            continue
        where, known = printed.setdefault(title, (words, {}))
        new = {flag: text for flag, text in entries.items() if known.get(flag) != text}
        if where == words:
            known.update(entries)
            groups.append("\n".join([title, *entries.values()]))
        elif new:
            groups.append("\n".join([f"{title} as for muster {where}, but", *new.values()]))
        else:
            groups.append(f"{title} as for muster {where}")
    return "\n\n".join([*head, *groups])


def entries_of(text: str) -> dict[str, str]:
    """Flags with their lines."""
    found: dict[str, str] = {}
    flag = ""
    for line in text.splitlines():
        if re.match(r"^  \S", line):
            flag = line.split()[0]
            found[flag] = line
        elif flag:
            found[flag] += f"\n{line}"
    return found


def page() -> str:
    printed: Printed = {}
    parts = [HEAD]
    for name, (_, text) in COMMANDS.items():
        parts.append(f"## muster {name}\n\n{text[0].upper()}{text[1:]}.\n")
        parts.append(f"```text\n{section(name, printed)}\n```\n")
    for title, command, names in (
        ("Recipe", "sweep", RECIPES),
        ("Training", "train", {**TASKS, **AGENTS}),
        ("Map", "map", MAPS),
    ):
        for name in names:
            text = section(f"{command} {name}", printed)
            parts.append(f"## {title} {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def files() -> str:
    _, _, tree = (muster.run.folder.__doc__ or "").partition("\n\n")
    return FILES.format(tree=tree.rstrip())


def schema() -> str:
    """That of experiment files."""
    return json.dumps(experiment_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    pages = {"cli.md": page(), "files.md": files(), "experiment.schema.json": schema()}
    if "--stdout" in sys.argv:
        sys.stdout.write("".join(pages.values()))
    else:
        for name, text in pages.items():
            (TARGET / name).write_text(text)
