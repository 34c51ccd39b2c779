"""Arguments of a command with ``{name}`` places. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from muster.base.errors import UnknownNameError, UsageError

#: ``{lr}`` and, as Hydra and others name their settings, ``{model.width}``. What stands behind a
#: dollar sign belongs to a shell or to OmegaConf.
_PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][\w./-]*)\}")
#: The same values in the environment of every command.
_VARIABLE = re.compile(r"\$\{?MUSTER_(SEED|PARAMS|TASK_DIR)\b")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?|-?\.[0-9]+([eE][+-]?[0-9]+)?")

#: As the first word it is the very muster that runs the task, whether or not it is on the path.
OWN_PROGRAM = "muster"
#: Filled by muster, not by the user's parameters.
BUILT_IN = frozenset({"dir"})


def names_in(part: str) -> set[str]:
    """The places of one argument; ``{{`` and JSON braces are left alone."""
    return set(_PLACE.findall(part))


def has_places(target: str) -> bool:
    """Whether there are parameters for which ``target`` `is_command_of`."""
    return bool(_VARIABLE.search(target) or _PLACE.search(target))


def is_command_of(target: str, names: Collection[str]) -> bool:
    """Whether ``target`` is the line of a command that ``names`` are filled into."""
    if not names:
        return False
    variables = set(_VARIABLE.findall(target))
    places = names_in(target) | {name.lower() for name in variables}
    return "PARAMS" in variables or places.issuperset(names)


def is_number(text: str) -> bool:
    """Whether a command's value, a text, is a number to everybody: ``007`` and ``1_0`` are not."""
    return _NUMBER.fullmatch(text) is not None


def to_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def fill(part: str, values: Mapping[str, Any]) -> str:
    """``part`` with its places replaced; text that is no known place stays as it is."""
    return _PLACE.sub(lambda m: _text(values[m[1]]) if m[1] in values else m[0], part)


def shell_line(parts: Sequence[str]) -> str:
    """One line for ``sh -c``. Values are filled in unquoted later: that is what --shell is for."""
    return parts[0] if len(parts) == 1 else " ".join(_quoted(part) for part in parts)


def _quoted(part: str) -> str:
    return part if _PLACE.search(part) else shlex.quote(part)


def check_places(argv: Sequence[str], names: Sequence[str]) -> None:
    """Check that every place has a parameter and every parameter a place.

    Raises UnknownNameError for a place without a parameter, UsageError for a parameter that
    would have no effect.
    """
    if not argv:
        raise UsageError("There is no command after `--`.", hint="write: -- python train.py …")
    places = set().union(*(names_in(part) for part in argv))
    known = set(names) | BUILT_IN
    for place in sorted(places - known):
        raise UnknownNameError("place in the command", place, known)
    line = " ".join(argv)
    for name in names:
        if not is_command_of(line, [name]):
            raise UsageError(
                f"Parameter {name!r} does not appear in the command: all its values would run "
                "the same thing.",
                hint=f"write {{{name}}} where its value belongs, e.g. --{name} {{{name}}}.",
            )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
