"""``muster completion``: what a shell proposes while a command of muster is typed.

The script of a shell asks ``muster completion SHELL --line TEXT`` each time, so that flags are
those of the recipe that is named, and run folders those that there are. Nothing is started, and
no file of the user's is imported: what is known of a command is what its help shows without that.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from muster.base.errors import MusterError
from muster.base.flags import Flag, kind_of_word
from muster.base.modules import names_at_top
from muster.base.target import ONLY_READS
from muster.cli import help_page, output
from muster.cli.options import Option
from muster.cli.parse import parse
from muster.cli.values import choices
from muster.run.folder import RunFolder

_COMPLETION = """Print what makes a shell complete commands, flags, recipes and run folders.

Examples:
  source <(muster completion bash)                         # also in ~/.bashrc
  source <(muster completion zsh)                          # in ~/.zshrc, after compinit
  muster completion fish > ~/.config/fish/completions/muster.fish
"""
_PLAIN = re.compile(r"[\w@%+=:,./~-]*")
_SCRIPTS = {
    "bash": r"""_muster() {
    local IFS=$'\n'
    COMPREPLY=($(muster completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *: ]] && compopt -o nospace
    return 0
}
complete -o default -F _muster muster""",
    "zsh": r"""_muster() {
    local -a found
    found=("${(@f)$(muster completion zsh --line "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    [[ -n ${found[1]} ]] || { _files; return; }
    compadd -S '' -- "${(@M)found:#*:}"
    compadd -- "${(@)found:#*:}"
}
compdef _muster muster""",
    "fish": r"""function __muster_complete
    set -l found (muster completion fish --line (commandline -cp | string collect) 2>/dev/null)
    if set -q found[1]
        printf "%s\n" $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c muster -f -a '(__muster_complete)'""",
}


@dataclass(frozen=True, kw_only=True)
class _Completion:
    """For which shell."""

    shell: Annotated[Literal["bash", "zsh", "fish"], Flag(is_positional=True)]
    """bash, zsh or fish."""
    line: Annotated[str | None, Flag(metavar="TEXT")] = None
    """The line that is typed so far: print what may come next. The shell gives this flag."""


class Candidate(NamedTuple):
    text: str
    about: str = ""


def main(argv: list[str]) -> int:
    flags = parse(_Completion, argv, "completion", _COMPLETION)
    if flags.line is None:
        output.say(_SCRIPTS[flags.shell])
        return 0
    words, last = split_line(flags.line)
    # bash takes what follows the last `=` or `:` for the word that is typed.
    cut = max(last.rfind(":"), last.rfind("=")) + 1 if flags.shell == "bash" else 0
    # bash puts in what it reads here as it is, where the other shells quote it. What a shell would
    # understand as more than a word is left to its own completion of files.
    fits: Callable[[str], object] = _PLAIN.fullmatch if flags.shell == "bash" else str.isprintable
    for found in dict.fromkeys(candidates(words, last)):
        about = f"\t{found.about}" if flags.shell == "fish" and found.about else ""
        if fits(found.text):
            output.say(found.text[cut:] + about)
    return 0


def split_line(line: str) -> tuple[list[str], str]:
    """The words after ``muster``, and the one that is being typed, which may be empty."""
    words = line.split()
    for quote in ("", "'", '"'):  # the last quotation may not be closed yet
        with suppress(ValueError):
            words = shlex.split(line + quote)
            break
    last = words.pop() if words and not line[-1].isspace() else ""
    return words[1:], last


def candidates(words: Sequence[str], last: str) -> Iterator[Candidate]:
    """What may be in the place of ``last``, which begins it; nothing where files may be."""
    for found in _all(list(words), last):
        if found.text.startswith(last):
            yield found


def _all(words: list[str], last: str) -> Iterator[Candidate]:
    from muster.cli.main import COMMANDS, PROGRAM_FOLLOWS

    if not words or words == ["help"]:
        yield from (Candidate(name, text) for name, (_, text) in COMMANDS.items())
        yield from () if words else (Candidate("help"), Candidate("--help"), Candidate("--version"))
        return
    command, *rest = words
    if command not in COMMANDS or any(kind_of_word(word) == "end" for word in rest):
        return
    options = _options(command, rest)
    by_name = {f"--{one.name}": one for one in options if not one.flag.is_positional}
    name, equals, _ = last.partition("=")
    typed = _in_places(rest, by_name)
    if command in PROGRAM_FOLLOWS and typed:  # what follows is the program's
        return
    if kind_of_word(f"{last}x") == "flag" and not equals:  # what it may become
        yield from (Candidate(flag, _about(one)) for flag, one in by_name.items())
        yield from (
            Candidate(f"--no-{one.name}", _about(one)) for one in by_name.values()
            if one.arity == 0 and one.default is True and not one.flag.is_negated
        )  # fmt: skip
        yield from (Candidate("--help"), Candidate("--help-all"))
    elif equals:
        values = choices(by_name[name].kind) if name in by_name else []
        yield from (Candidate(f"{name}={value}") for value in values)
    elif rest and (option := by_name.get(rest[-1])) is not None and option.arity != 0:
        yield from map(Candidate, choices(option.kind))
    else:
        places = [one for one in options if one.flag.is_positional]
        yield from _in_place(command, places, typed, last)


def _in_places(words: Sequence[str], by_name: Mapping[str, Option]) -> list[str]:
    """The words that are no flags and no values of flags."""
    found: list[str] = []
    left: float = 0
    for word in words:
        if kind_of_word(word) == "flag":
            option = by_name.get(word)  # of `--flag=value` nothing is left
            left = 0 if option is None else math.inf if option.arity is None else option.arity
        elif left:
            left -= 1
        else:
            found.append(word)
    return found


def _in_place(
    command: str, places: Sequence[Option], typed: Sequence[str], last: str
) -> Iterator[Candidate]:
    """Runs, tasks of a run that have failed, recipes and functions."""
    names = [one.path[-1] for one in places]
    if names[:1] == ["runs"] or (names[:1] == ["run"] and not typed):
        yield from _runs(last)
    elif names[1:2] == ["task"] and len(typed) == 1:
        yield from _failed(typed[0])
    elif names[len(typed) : len(typed) + 1]:
        yield from map(Candidate, choices(places[len(typed)].kind))
    if command in ("sweep", "train", "map", "verify", "plan") and not typed:
        yield from map(Candidate, _recipes(command))
        yield from _targets(last, is_class=command in ("train", "verify", "plan"))


def _options(command: str, words: list[str]) -> Sequence[Option]:
    """The options of the command as it is typed so far, without its unfinished part where that
    cannot be read."""
    from muster.cli.main import run_command

    heard: list[Sequence[Option]] = []
    target = [word for word in words[:1] if kind_of_word(word) == "value"]
    token, nothing_runs = help_page.HEARS.set(heard.append), ONLY_READS.set(True)
    try:
        for attempt in (words, target, []):
            # The word for help comes first: whatever it is, such a command starts nothing.
            quiet = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
            with quiet[0], quiet[1], suppress(MusterError, SystemExit):
                run_command(command, ["--help", *attempt])
            if heard:
                return heard[0]
    finally:
        help_page.HEARS.reset(token)
        ONLY_READS.reset(nothing_runs)
    return ()


def _about(option: Option) -> str:
    return help_page.own_text(option).split(". ")[0][:80]


def _runs(last: str) -> Iterator[Candidate]:
    """Those below ./runs, or below the folder that is typed."""
    typed = last[: last.rfind("/") + 1] or "runs/"
    with suppress(OSError):
        found = [path.name for path in Path(typed).iterdir() if RunFolder(path).exists()]
        yield from (Candidate(f"{typed}{name}") for name in sorted(found))


def _failed(run: str) -> Iterator[Candidate]:
    from muster.api.look.listing import find_run

    with suppress(MusterError):
        for named in find_run(run).failed_tasks():
            number, _, about = named.partition(" ")
            yield Candidate(number, about)


def _recipes(command: str) -> list[str]:
    from muster.api.recipe import AgentRecipe, MapRecipe, Recipe, TrainRecipe
    from muster.cli.recipes import names_of

    kinds: dict[str, tuple[type, ...]] = {"sweep": (Recipe,), "map": (MapRecipe,)}
    return names_of(*kinds.get(command, (TrainRecipe, AgentRecipe)))


def _targets(last: str, *, is_class: bool) -> Iterator[Candidate]:
    """Files of Python and, behind the colon, what is in one."""
    file, colon, _ = last.partition(":")
    if not colon:
        yield from (Candidate(f"{path}:") for path in sorted(Path().glob(f"{file or ''}*.py")))
        return
    with suppress(OSError, SyntaxError, ValueError):
        for name in names_at_top(Path(file).read_bytes(), "class" if is_class else "function"):
            yield Candidate(f"{file}:{name}")
