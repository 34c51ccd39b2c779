"""Every error a user can meet, and the exit code each one ends the program with.

MusterError                 exit 3 unless a subclass says otherwise
├── UsageError              exit 2: the command line or the call is wrong
│   ├── UnknownNameError    a name that does not exist, with the nearest that does
│   └── PlanMismatchError   the run folder holds another plan, or the target's code changed
├── SetupError              exit 3: this machine or this folder cannot do it
│   ├── MissingPackageError an extra of muster is not installed
│   ├── LedgerError         the ledger cannot be read or written
│   └── PlacementError      no device to run on
└── TargetError             exit 2: the user's target cannot be loaded or called

A message says what happened with which values, why it matters and what to do next.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from muster.base.shown_text import with_names_read

_PARAMETER = re.compile(r"[A-Za-z_][\w./-]*\Z")

EXIT_OK = 0
EXIT_SOME_FAILED = 1
EXIT_USAGE = 2
EXIT_SETUP = 3
#: A gang has saved and asks to be started again (EX_TEMPFAIL of sysexits, SLURM's convention).
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


class MusterError(Exception):
    """Base of all errors that are shown as text, without a traceback."""

    exit_code = EXIT_SETUP
    #: Whose it is, where one of several hosts could not do its part.
    host = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nHint: {hint}")


class UsageError(MusterError):
    """The command line or the call is wrong; nothing was started."""

    exit_code = EXIT_USAGE


class UnknownNameError(UsageError):
    """A name that does not exist; the message proposes the nearest one that does, or says
    ``otherwise``."""

    def __init__(self, what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
        names = sorted(known)
        near = nearest(name, names)
        listing = ", ".join(names) if names else "none"
        hint = f"did you mean {near!r}? " if near else ""
        more = f" {otherwise}" if otherwise and not near else ""
        shown = with_names_read(name)  # which a quoted text would write out
        super().__init__(f"Unknown {what} {shown!r}.", hint=f"{hint}Known: {listing}.{more}")


class PlanMismatchError(UsageError):
    """The run folder belongs to another plan, or the target's code has changed."""


class TargetError(UsageError):
    """The target cannot be found, imported or called with these parameters."""


class SetupError(MusterError):
    """This machine or this folder cannot do it."""

    exit_code = EXIT_SETUP


class MissingPackageError(SetupError):
    """An optional package is not installed; the hint names the extra that brings it, or without
    one the package."""

    def __init__(self, doing: str, package: str, extra: str, *, instead: str = "") -> None:
        other = f", or {instead}" if instead else ""
        install = how_to_install(extra) if extra else f"pip install {package}"
        super().__init__(
            f"{doing} needs the package {package}, which is not installed.",
            hint=f"{install}{other}.",
        )


def how_to_install(extra: str) -> str:
    """The command that brings an extra: pip finds the muster that is installed, also from a clone.

    A clone that runs by PYTHONPATH is not installed; there the command names the clone.
    """
    from importlib import metadata
    from pathlib import Path

    clone = Path(__file__).parents[3]
    try:
        metadata.distribution("muster-gpu")
    except metadata.PackageNotFoundError:
        if (clone / "pyproject.toml").is_file():
            return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'muster-gpu[{extra}]'"


class LedgerError(SetupError):
    """The ledger cannot be read or written; what it holds is left untouched."""


class PlacementError(SetupError):
    """There is no device to run on."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The one of ``known`` that ``word`` may be meant as; "" where none is near."""
    import difflib  # here: whoever starts something loads this module, and few make a mistake

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def check_ranges(settings: Any, *, positive: Iterable[str], not_negative: Iterable[str]) -> None:
    """UsageError, named as the flag is, for a field out of its range or not finite.

    None is a setting that was not given.
    """
    for name in positive:
        value = getattr(settings, name)
        if value is not None and (value <= 0 or not math.isfinite(value)):
            raise UsageError(f"--{flag_of(name)} must be greater than 0, not {value}.")
    for name in not_negative:
        value = getattr(settings, name)
        if value is not None and (value < 0 or not math.isfinite(value)):
            raise UsageError(f"--{flag_of(name)} must be 0 or more, not {value}.")


def check_names(settings: Any, names: Iterable[str]) -> None:
    """UnknownNameError for a name that is no field of the dataclass ``settings``."""
    known = list(settings.__dataclass_fields__)
    for name in names:
        if name not in known:
            raise UnknownNameError("training setting", name, known)


def check_parameter_name(name: str) -> None:
    """UsageError for a name that no parameter of a sweep, map or search can have.

    Dots, hyphens and slashes are allowed: a command has names such as ``model.lr`` of its own.
    """
    if _PARAMETER.match(name):
        return
    bare = name.lstrip("-")
    raise UsageError(
        f"{name!r} is not a parameter name.",
        hint=f"did you mean {bare!r}?"
        if _PARAMETER.match(bare)
        else "a name starts with a letter or '_' and has no spaces.",
    )


def flag_of(name: str) -> str:
    """How a field is written on the command line."""
    return name.replace("_", "-")


class NotTried(Exception):
    """What failed in the rehearsal of a hook, before it is needed, may work at the end."""


def cause_of(error: Exception, hook: Callable[..., Any]) -> str:
    """``error`` of a user's hook with the deepest line of its own file, or the deepest of all.

    Where the hook itself was not reached, or is done, the line is that of its definition.
    """
    import inspect  # neither is light, and most errors have no hook
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if own or code is None:
        frame = (own or list(frames))[-1]
        place = f"{frame.filename}:{frame.lineno}"
    else:
        place = f"{code.co_filename}:{code.co_firstlineno}"
    return f"{type(error).__name__}: {error} ({place})"
