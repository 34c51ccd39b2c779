"""What a page asks for: what stands behind the question mark of an address, names, values, and the
words of a filter; and what it may change, by the commands that a user would type, each in its own
process.

So an action does what the command does, with its locks and its requests, and this process writes
into no run.
"""

from __future__ import annotations

import math
import operator
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple
from urllib.parse import urlencode

from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, SetupError, UsageError
from muster.base.settings import child_environment
from muster.farm.ledger.read import LedgerReader
from muster.web.folder import Folder

_MOST_CHARS = 1000
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"(?=\s|$)|((?:[^\s"]|"(?:[^"\\]|\\.)*")+)')
_TEST = re.compile(r'([^=<>!~"]+)(>=|<=|!=|=|>|<|~)(.*)', re.DOTALL)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
    "<": operator.lt, "<=": operator.le,
}  # fmt: skip


class BadQuery(UsageError):
    """What stands behind the question mark cannot be understood."""


class Query:
    """Names, each with one value or several. What should be a number and is not raises BadQuery."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    @classmethod
    def of(cls, **values: object) -> Query:
        return cls((name, str(value)) for name, value in values.items())

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[-1]

    def many(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number, brought into ``low`` … ``high``."""
        found = self.maybe(name)
        return default if found is None else int(min(max(found, low), high))

    def maybe(self, name: str) -> float | None:
        """A number, or None where none was given."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadQuery(f"{name}={text[:40]!r} is not a number.")
        return value

    def but(self, values: Mapping[str, object]) -> str:
        """The same words with other values, as they are written behind the question mark."""
        kept = [(n, v) for n, all_of in self._values.items() if n not in values for v in all_of]
        return urlencode([*kept, *((n, str(v)) for n, v in values.items() if v is not None)])


class Word(NamedTuple):
    """One word. Without a ``column`` some cell has to hold ``text``."""

    column: str
    sign: str
    text: str


def parse(text: str) -> list[Word]:
    """All of these have to hold.

    >>> parse('lr>=0.01 name="a b" "out of memory"')
    [Word(column='lr', sign='>=', text='0.01'), Word(column='name', sign='=', text='a b'), \
Word(column='', sign='~', text='out of memory')]
    """
    if len(text) > _MOST_CHARS:
        raise BadQuery(f"The filter is longer than {_MOST_CHARS:,} characters.")
    tests = []
    for found in _WORD.finditer(text):
        quoted, word = found.groups()
        test = _TEST.fullmatch(word) if word is not None else None
        if test is not None:
            tests.append(Word(test[1], test[2], _bare(test[3])))
        else:
            tests.append(Word("", "~", _bare(word) if word is not None else _unescaped(quoted)))
    return tests


def predicate(test: Word) -> Callable[[Any], bool]:
    """Whether a cell passes. Numbers are compared as numbers, anything else as text; a cell without
    a value passes only ``!=``.
    """
    if test.sign == "~":
        wanted = test.text.casefold()
        return lambda cell: cell is not None and wanted in str(cell).casefold()
    compare = _COMPARE[test.sign]
    number, text = _number(test.text), test.text

    def passes(cell: Any) -> bool:
        if cell is None:
            return test.sign == "!="
        if isinstance(cell, bool):
            return compare(str(cell).lower(), text.lower())
        if isinstance(cell, int | float) and number is not None:
            return compare(cell, number)
        if isinstance(cell, int | float) and test.sign not in ("=", "!="):
            return False
        return compare(str(cell), text)

    return passes


def _bare(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return _unescaped(text[1:-1]) if is_quoted else text


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Command(NamedTuple):
    """``limit_s``: how long the answer waits. What cancels or gives back ends by itself; what tries
    again goes on for as long as the tasks do, and has ended by then where it is refused.
    """

    name: str
    flags: tuple[str, ...] = ()
    limit_s: float = 60.0


_COMMANDS = {
    "cancel": _Command("cancel"),
    "retry": _Command("retry", ("--quiet",), limit_s=5.0),
    "release": _Command("devices", ("--release", "1")),
}
_MOST_SAID = 4000


class Refused(SetupError):
    """The command was refused; its message is the command's own."""


def act(folder: Folder, asked: Mapping[str, Any]) -> dict[str, str]:
    """Do it, or begin it. ``task``: what is cancelled is this one alone.

    Raises UsageError for an unknown action or task, Refused where it cannot be.
    """
    name = asked.get("action")
    if not isinstance(name, str) or name not in _COMMANDS:
        raise UsageError(
            f"There is no action {str(name)[:40]!r}.", hint=f"known: {', '.join(_COMMANDS)}."
        )
    command = _COMMANDS[name]
    # -P: nothing is imported from the folder in which the dashboard was started.
    words = [
        sys.executable,
        "-P",
        "-m",
        "muster",
        command.name,
        str(folder.run.path.absolute()),
        *command.flags,
        *_task(folder, asked),
    ]
    # Files, not pipes: what it starts outlives the dashboard. A session of its own: Ctrl-C here is
    # not for it.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            start_new_session=True, env=child_environment({}),
        )  # fmt: skip
        try:
            code = process.wait(command.limit_s)
        except subprocess.TimeoutExpired:
            # Somebody has to collect it when it ends.
            threading.Thread(target=process.wait, daemon=True).start()
            return {"said": f"`muster {command.name}` has begun."}
        words_of = [_text(file) for file in (said, complained)]
    if code not in (EXIT_OK, EXIT_SOME_FAILED):
        text, _, hint = words_of[1].removeprefix("muster: ").partition("\nHint: ")
        raise Refused(
            text or f"`muster {command.name}` ended with exit code {code}.", hint=hint or None
        )
    return {"said": words_of[0] or f"`muster {command.name}` has ended."}


def _task(folder: Folder, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The task that is named, as words of the command: a number, whatever was sent."""
    if "task" not in asked:
        return ()
    run = folder.expect_tasks()
    with LedgerReader(folder.folder.ledger) as ledger:
        return "--task", str(run.task_number(ledger, str(asked["task"])))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_SAID).decode("utf-8", "replace").strip()
