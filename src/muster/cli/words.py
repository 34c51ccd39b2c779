"""The words of a command line before they are options: what each is, where target and program are,
and what to write instead where a program was given as the target of a sweep.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from muster.base.errors import MusterError, UsageError
from muster.base.flags import kind_of_word

_SCRIPTS = (".py", ".sh")
_PLAIN = re.compile(r"[\w@%+=:,./-]*(\{[\w./-]+\}[\w@%+=:./-]*)*")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--`` and those after it; UsageError where nothing follows it."""
    words = list(argv)
    cut = next((at for at, word in enumerate(words) if kind_of_word(word) == "end"), len(words))
    if cut + 1 == len(words):
        raise UsageError("There is no command after `--`.", hint="write: -- python train.py …")
    return words[:cut], words[cut + 1 :]


def split_target(words: Sequence[str], is_it: Callable[[str], bool]) -> tuple[str, list[str]]:
    """What the flags are for, "" where it is not said, and the other words: flags may come before
    it, as in ``muster sweep --seeds 3 train.py:run``.
    """
    for position, word in enumerate(words):
        if (position == 0 and kind_of_word(word) == "value") or is_it(word):
            return word, [*words[:position], *words[position + 1 :]]
    return "", list(words)


def wants_slurm(words: Sequence[str]) -> bool:
    """Whether ``--on slurm`` is among them, before anything is parsed."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    return any(word == "--on=slurm" or (word, value) == ("--on", "slurm") for word, value in pairs)


def is_script(word: str) -> bool:
    return word.endswith(_SCRIPTS) and Path(word).is_file()


def as_program(words: Sequence[str], flags: Collection[str]) -> str | None:
    """The command line that sweeps the program in ``words``; None where there is no program.

    ``flags``: those of ``muster sweep``, which stay before the ``--``. All else belongs to the
    program, and each of the user's own parameters gets its place.
    """
    from muster.farm.template import names_in

    program = _program(words[0])
    if program is None:
        return None
    options, names = [], []
    taker = ""  # the flag of ours that values go to
    for word in words[1:]:
        is_flag = kind_of_word(word) == "flag"
        flag = word.partition("=")[0].replace("_", "-") if is_flag else ""
        if flag in flags:
            taker = flag
        elif is_flag:
            taker = ""
        if taker:
            options.append(word)
            names += _names(taker, word if not flag else word.partition("=")[2])
        else:
            program.append(word)
    placed = set().union(*map(names_in, program))
    for name in dict.fromkeys(names):
        if name not in placed:
            program += [f"{name}={{{name}}}"] if "." in name else [f"--{name}", f"{{{name}}}"]
    return " ".join(map(_quoted, ["muster", "sweep", *options, "--", *program]))


def _program(word: str) -> list[str] | None:
    parts = shlex.split(word) if " " in word else [word]
    if not parts:
        return None
    if is_script(parts[0]):
        python = "python" if shutil.which("python") else "python3"
        return [python if parts[0].endswith(".py") else "sh", *parts]
    return parts if shutil.which(parts[0]) is not None else None


def _names(flag: str, value: str) -> list[str]:
    if flag in ("--grid", "--zip"):
        name, equals, _ = value.partition("=")
        return [name] if equals else []
    if flag == "--seeds":
        return ["seed"] if value else []
    if flag == "--list" and value:
        from muster.farm.space_texts import read_list

        try:
            return list(read_list(Path(value)).names)
        except MusterError:
            return []
    return []


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)
