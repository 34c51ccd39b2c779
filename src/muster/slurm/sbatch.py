"""The text of a batch script for SLURM: its options checked, its words quoted. Pure.

``#SBATCH`` lines are not read by a shell: nothing in them is expanded, and words are split at
blanks unless quoted. The lines below them are bash.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster.base.errors import UsageError

#: Cores that are asked for with each GPU where nobody has said how many.
CORES_PER_GPU = 4
_TIME = re.compile(r"(?:\d+-\d{1,2}(?::\d{1,2}){0,2}|\d+(?::\d{1,2}){0,2})")
_MEMORY = re.compile(r"\d+[KMGT]?")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
#: What muster says itself; a second one would contradict it.
_OURS = {
    "array": "", "output": "--run-dir", "error": "--run-dir", "signal": "", "requeue": "",
    "no-requeue": "", "job-name": "", "open-mode": "", "wrap": "", "chdir": "", "dependency": "",
    "parsable": "", "wait": "", "export": "", "nodes": "--nodes", "ntasks": "--nodes",
    "ntasks-per-node": "--gpus", "partition": "--partition", "account": "--account",
    "time": "--time", "mem": "--mem", "cpus-per-task": "--cpus-per-node or --cpus-per-worker",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """A batch script: what is asked of SLURM, then what the job does.

    Attributes
        options: ``(name, value)`` of sbatch's long options, without dashes; an empty value is a
            switch. The same name twice is the caller's mistake.
        lines: bash, run from the folder that sbatch was called in.
    """

    options: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]

    def text(self) -> str:
        """The script as it is sent."""
        directives = [directive(name, value) for name, value in self.options]
        return "\n".join(["#!/bin/bash", *directives, "", *self.lines, ""])


def directive(name: str, value: str = "") -> str:
    """One ``#SBATCH`` line.

    >>> directive("comment", "two words")
    '#SBATCH --comment="two words"'
    """
    _check_one_line(f"--{name}", value)
    if not value:
        return f"#SBATCH --{name}"
    is_plain = re.fullmatch(r"[^\s'\"\\#]+", value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"#SBATCH --{name}={value}" if is_plain else f'#SBATCH --{name}="{quoted}"'


def command_line(words: Sequence[str], *, unquoted: Sequence[str] = ()) -> str:
    """Words for bash, quoted so that nothing in them is expanded: ``${…}`` stays as it is.

    ``unquoted``: words that the shell is to expand, put behind the others as they are.

    >>> command_line(["echo", "${HOME} it's"], unquoted=['"$SLURM_NODEID"'])
    'echo \\'${HOME} it\\'"\\'"\\'s\\' "$SLURM_NODEID"'
    """
    return " ".join([shlex.join(words), *unquoted])


def check_time(text: str, flag: str = "--time") -> str:
    """``text`` when it is a time limit as SLURM reads it; UsageError otherwise.

    >>> check_time("4:00:00"), check_time("2-12"), check_time("90")
    ('4:00:00', '2-12', '90')
    """
    if not _TIME.fullmatch(text) or not re.search(r"[1-9]", text):
        raise UsageError(
            f"{flag} {text}: SLURM cannot read this as a time limit.",
            hint="write 90 (minutes), 4:00:00 (hours:minutes:seconds) or 2-12:00:00 (days-…).",
        )
    return text


def time_limit_s(text: str) -> int:
    """Seconds in a time limit that ``check_time`` has let pass.

    >>> time_limit_s("90"), time_limit_s("1:30"), time_limit_s("1-2"), time_limit_s("0:0:5")
    (5400, 90, 93600, 5)
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 1:  # minutes
        hours, minutes, seconds = 0, parts[0], 0
    else:  # [hours:]minutes:seconds
        hours, minutes, seconds = ([0, *parts])[-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_memory(text: str, flag: str = "--mem") -> str:
    """``text`` when it is an amount of memory as SLURM reads it; UsageError otherwise.

    >>> check_memory("16G"), check_memory("16GB"), check_memory("500")
    ('16G', '16G', '500')
    """
    short = text.upper().removesuffix("IB").removesuffix("B")
    if not _MEMORY.fullmatch(short):
        raise UsageError(
            f"{flag} {text}: SLURM cannot read this as an amount of memory.",
            hint="write 16G, or a whole number of megabytes: 16000. 0 asks for all of the node's.",
        )
    return short


def further_option(text: str, flag: str = "--slurm-arg") -> tuple[str, str]:
    """``NAME=VALUE`` or ``NAME`` (a switch) as an option; UsageError where muster says it itself.

    >>> further_option("--constraint=a100&nvlink")
    ('constraint', 'a100&nvlink')
    """
    name, _, value = text.strip().removeprefix("--").partition("=")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{flag} {text}: write a long option of sbatch as NAME=VALUE, or NAME for a switch.",
            hint=f"such as {flag} constraint=a100 {flag} exclusive",
        )
    if name in _OURS:
        other = f"use {_OURS[name]}." if _OURS[name] else "leave it out."
        raise UsageError(f"{flag} {name}: muster sets this option itself.", hint=other)
    _check_one_line(f"{flag} {name}", value)
    return name, value


def further_options(texts: Sequence[str], flag: str = "--slurm-arg") -> dict[str, str]:
    """All of them by name; the last of a name wins, as with sbatch itself."""
    return dict(further_option(text, flag) for text in texts)


def gpus_among(options: Mapping[str, str]) -> int:
    """How many GPUs of a node sbatch's own options ask for, such as ``gres=gpu:a100:4``.

    >>> gpus_among({"gres": "gpu:a100:4"}), gpus_among({"gpus": "2"}), gpus_among({"nice": "9"})
    (4, 2, 0)
    """
    for name in ("gpus-per-node", "gres", "gpus"):
        value = options.get(name, "")
        found = re.search(r"gpu(?:\S*?)(?::(\d+))?(?:,|$)" if name == "gres" else r"(\d+)$", value)
        if found:
            return int(found[1] or 1)
    return 0


def _check_one_line(flag: str, value: str) -> None:
    if any(ord(character) < 32 for character in value):
        raise UsageError(f"{flag} {value!r}: the value of an option of sbatch is one line.")
