"""What the administrator of a shared machine lays down about its GPUs: one TOML file of root's.

.. code-block:: toml

    half_life = "7d"              # what was used counts half as much after this

    [default]                     # of users who have no section
    share = 1
    max_gpus = 4                  # held at the same time; left out: as many as there are
    max_priority = 0              # what --queue-priority may ask for at most

    [users.ada]                   # a name or a number
    share = 2

    [[reservation]]
    users = ["ada"]
    gpus = ["GPU-8932f937-..."]   # UUIDs; left out: all
    from = 2026-12-01T08:00:00
    until = 2026-12-03T20:00:00
"""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.base.flags import parse_duration
from muster.base.settings import Settings
from muster.devices.queue import Reservation, Rules, Terms
from muster.devices.tickets import own_uid

if sys.platform != "win32":
    import pwd

_MOST_BYTES = 1 << 20


def read_rules(settings: Settings) -> Rules:
    """The rules of this machine; without a file all users are alike.

    Raises SetupError for a file that others than root can write to, and for one that cannot be
    understood: a rule that is not kept would be worse than none.
    """
    path = Settings.queue_rules
    if settings.queue_rules != path and _is_own(settings.lease_folder):
        path = settings.queue_rules  # for trying them out: nobody else is in that folder
    try:
        # What was checked is what is read: the same open file.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        return Rules()
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from None
    try:
        _check_owner(path, os.fstat(handle))
        text = os.read(handle, _MOST_BYTES)
    finally:
        os.close(handle)
    import tomllib

    try:
        return _rules(tomllib.loads(text.decode()))
    except (ValueError, TypeError, AttributeError, UsageError) as error:
        raise _wrong(path, f"cannot be understood: {error}") from None


def _is_own(folder: Path) -> bool:
    """Whether this user made the folder, or would make it."""
    try:
        return folder.stat().st_uid == own_uid()
    except OSError:
        return True


def _check_owner(path: Path, about: os.stat_result) -> None:
    """Who may change the rules: root alone, in a folder of root's."""
    if sys.platform == "win32":
        return
    for what, one in (("it", about), (f"its folder {path.parent}", path.parent.stat())):
        if one.st_uid != 0:
            raise _wrong(path, f"is not trusted: {what} belongs to user {one.st_uid}")
        if one.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _wrong(path, f"is not trusted: others than root may write to {what}")
    if not stat.S_ISREG(about.st_mode):
        raise _wrong(path, "is not a regular file")


def _wrong(path: Path, what: str) -> SetupError:
    return SetupError(
        f"The file with the rules of this machine's GPUs, {path}, {what}.",
        hint=f"as root: chown root {path.parent} {path}; chmod go-w {path.parent} {path}; "
        "docs/devices.md says what can stand in it.",
    )


def _rules(text: Mapping[str, Any]) -> Rules:
    _check_names(text, {"half_life", "default", "users", "reservation"}, "the file")
    default = _terms(text.get("default", {}), Terms(), "[default]")
    users = {
        uid: _terms(terms, default, f"[users.{name}]")
        for name, terms in text.get("users", {}).items()
        if (uid := _uid(name)) is not None  # who has no account any more has no rule either
    }
    half_life_s = parse_duration(str(text.get("half_life", "7d")), "half_life")
    if half_life_s <= 0:
        raise ValueError("half_life must be greater than 0")
    return Rules(
        half_life_s=half_life_s,
        default=default,
        users=users,
        reservations=tuple(_reservation(one) for one in text.get("reservation", ())),
    )


def _terms(text: Mapping[str, Any], default: Terms, where: str) -> Terms:
    _check_names(text, {"share", "max_gpus", "max_priority"}, where)
    share = text.get("share", default.share)
    if isinstance(share, bool) or not (isinstance(share, int | float) and 0 < share < math.inf):
        raise ValueError(f"share in {where} must be greater than 0, not {share!r}")
    numbers = {}
    for name in ("max_gpus", "max_priority"):
        value = text.get(name, getattr(default, name))
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not (is_number or (name == "max_gpus" and name not in text)):
            raise ValueError(f"{name} in {where} must be a whole number, not {value!r}")
        numbers[name] = value
    if numbers["max_gpus"] is not None and numbers["max_gpus"] < 0:
        raise ValueError(f"max_gpus in {where} must not be below 0")
    return Terms(share=float(share), **numbers)


def _reservation(text: Mapping[str, Any]) -> Reservation:
    _check_names(text, {"users", "gpus", "from", "until"}, "[[reservation]]")
    if not isinstance(text.get("users"), list):
        raise ValueError('a [[reservation]] must say whom it is for: users = ["ada"]')
    times = {}
    for name, default in (("from", -math.inf), ("until", math.inf)):
        value = text.get(name)
        if value is not None and not isinstance(value, datetime):
            raise ValueError(f"{name} in [[reservation]] must be a date and a time, not {value!r}")
        times[name] = default if value is None else value.timestamp()
    uids = {str(name): _uid(str(name)) for name in text["users"]}
    if unknown := [name for name, uid in uids.items() if uid is None]:
        # The GPUs would be kept from everybody.
        raise ValueError(f"a [[reservation]] is for {unknown[0]}, and there is no such user")
    return Reservation(
        uids=frozenset(uid for uid in uids.values() if uid is not None),
        devices=frozenset(map(str, text.get("gpus", ()))),
        from_s=times["from"],
        until_s=times["until"],
    )


def _check_names(text: Any, known: set[str], where: str) -> None:
    if not isinstance(text, dict):
        raise ValueError(f"{where} is not a table")
    if unknown := sorted(text.keys() - known):
        raise ValueError(
            f"{unknown[0]} in {where} is unknown; known are {', '.join(sorted(known))}"
        )


def _uid(name: str) -> int | None:
    """The user's number; None for who has no account."""
    if name.isdecimal():
        return int(name)
    if sys.platform != "win32":
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    return None
