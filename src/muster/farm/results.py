"""What a task returned, as fields: each becomes a column, and nothing is lost after the work.

===============================  ===================================================
returned                         fields
===============================  ===================================================
a mapping, dataclass, namedtuple its entries by name; nested ones as ``a.b``
a tuple                          ``value_0``, ``value_1``, …
a list, number, text, 0-d tensor ``value``
None                             none
===============================  ===================================================

A field holds a number, text, boolean, None, or a list of those. Dates and paths become text. What
is none of it (a tensor with dimensions, a set, an object) goes into a file beside the row, and
the field holds that file's name.

Files of an attempt are private until its result is accepted; `publish` renames them into place.
What a task saves to go on from is its own, unless `hand_on` gives another task a copy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import shutil
import struct
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping
from contextlib import suppress
from datetime import date, time
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from muster.base.atomic_files import replacing, sync_folder, sync_tree, write_atomic
from muster.base.errors import TargetError
from muster.farm.canonical import (
    MAX_DEPTH,
    PLAIN,
    plain_scalar,
    shown_type,
    too_deep,
    unwrap_scalar,
)
from muster.farm.task import TaskState
from muster.run.folder import RunFolder

#: Field name to value.
Result = dict[str, Any]
#: Stores what has no column under the field's name; returns what stands in the cell.
Keep = Callable[[str, object], str]

_VALUE = "value"
_TEXT = frozenset({str})
#: Types in an annotation that do not become columns as they are.
_BESIDE = re.compile(
    r"\b(set|frozenset|complex|bytes|bytearray|ndarray|Tensor|DataFrame|Series|Module|Figure)\b"
)


def check_result(value: object, keep: Keep | None = None) -> Result:
    """The fields of what a task returned, as `canonical.encode` takes them.

    Without ``keep`` a value that has no column is a TargetError that names the field. Always one:
    a generator, and two fields of the same name. A dict that needs no change is returned itself.
    """
    if type(value) is dict and _is_plain(value):
        return value
    if isinstance(value, Generator | Coroutine):
        raise TargetError(
            f"The task returned {shown_type(value)}: nothing of its body has run.",
            hint="call it to its end and return what it made.",
        )
    fields: Result = {}
    if value is None:
        return fields
    entries = _entries(value)
    if entries is None and type(value) is tuple and value:
        entries = {f"{_VALUE}_{index}": item for index, item in enumerate(value)}
    _add(fields, "", {_VALUE: value} if entries is None else entries, keep, 0)
    return fields


def _is_plain(value: dict[Any, Any]) -> bool:
    return _TEXT.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values()))


class _Kept(NamedTuple):
    """How it is said that a value cannot be kept. ``do``: what its owner does with it."""

    said: str
    what: str
    do: str


_RESULT = _Kept("The task returned", "a result", "return")
_STATE = _Kept("ctx.checkpoint was given", "a checkpoint", "give")


def plain_state(state: Mapping[str, Any]) -> object:
    """What a task saves to go on from, as `canonical.encode` takes it."""
    return plain(state, "state", kept=_STATE)


def plain(value: object, path: str, depth: int = 0, *, kept: _Kept = _RESULT) -> object:
    """``value`` of numbers, texts, lists and dicts, without the types of libraries around it."""
    value = plain_scalar(unwrap_scalar(value.value if isinstance(value, Enum) else value))
    if type(value) in PLAIN:
        return value
    if depth >= MAX_DEPTH:
        raise too_deep(path)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    entries = _entries(value)
    if entries is not None:
        inner: Result = {}
        for key, item in entries.items():
            if not isinstance(key, str):
                raise _not_a_name(key, path, kept)
            inner[str.__str__(key)] = plain(item, f'{path}["{key}"]', depth + 1, kept=kept)
        return inner
    if isinstance(value, list | tuple):
        if PLAIN.issuperset(map(type, value)):
            return list(value)
        return [
            item if type(item) in PLAIN else plain(item, f"{path}[{i}]", depth + 1, kept=kept)
            for i, item in enumerate(value)
        ]
    raise TargetError(
        f"{kept.said} {path} = {shown_type(value)}, which cannot be stored as {kept.what}.",
        hint=_remedy(value, kept.do),
    )


def keep_beside(folder: Path, name: str, value: object) -> str:
    """Write ``value`` into a file of ``folder``, pickled, or as text; returns the file's name."""
    import pickle

    stem = re.sub(r"[^\w.-]+", "-", name)[:80].strip("-.") or _VALUE
    stem = _free_name({path.stem for path in folder.iterdir()}, stem)
    try:
        data, suffix = pickle.dumps(value), "pickle"
    except Exception:  # an object may raise anything when it is pickled, or printed
        try:
            data, suffix = repr(value).encode("utf-8", "backslashreplace"), "txt"
        except Exception:
            data, suffix = shown_type(value).encode("utf-8", "backslashreplace"), "txt"
    path = folder / f"{stem}.{suffix}"
    path.write_bytes(data)
    return path.name


def note_on(annotation: str) -> str:
    """A sentence about values of this return annotation that become no column, or ""."""
    beside = _BESIDE.search(annotation)
    if beside is None:
        return ""
    return (
        f"it returns {annotation}: a single number becomes a column, and any other "
        f"{beside[0]} is saved as a pickled file beside its row"
    )


def _entries(value: object) -> Mapping[Any, object] | None:
    """The fields of a mapping, dataclass or namedtuple by name; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: Mapping[Any, object] = value._asdict()
        return named
    return None


def _add(
    fields: Result, prefix: str, entries: Mapping[Any, object], keep: Keep | None, depth: int
) -> None:
    if depth >= MAX_DEPTH:
        raise too_deep(f"result[{prefix!r}]")
    for key, item in entries.items():
        name = prefix + _name(key, f"result[{prefix!r}]" if prefix else "result")
        inner = _entries(item) if type(item) not in PLAIN else None
        # Beside an entry that is called a.b, the mapping a stays one field.
        if inner and not any(str(other).startswith(f"{key}.") for other in entries):
            _add(fields, f"{name}.", inner, keep, depth + 1)
            continue
        try:
            _put(fields, name, plain(item, f'result["{name}"]'))
        except TargetError:
            if keep is None or name in fields:
                raise
            fields[name] = keep(name, item)


def _put(fields: Result, name: str, value: object) -> None:
    if name in fields:
        raise TargetError(
            f"The task returned two fields that are both named {name!r}.",
            hint="give one of them another name.",
        )
    fields[name] = value


def _name(key: object, path: str) -> str:
    key = plain_scalar(unwrap_scalar(key.value if isinstance(key, Enum) else key))
    if type(key) in PLAIN:
        return str(key)
    raise _not_a_name(key, path, _RESULT)


def _not_a_name(key: object, path: str, kept: _Kept) -> TargetError:
    is_result = kept is _RESULT
    return TargetError(
        f"{kept.said} {path} with the key {key!r} of type {type(key).__name__}: "
        + ("fields become columns, so their names must be texts or numbers." if is_result
           else "the keys of a checkpoint must be texts."),
        hint=f"{kept.do} {{str(key): value}}, here {str(key)!r}.",
    )  # fmt: skip


def _remedy(value: object, do: str) -> str:
    if callable(getattr(value, "tolist", None)):
        return ".tolist() turns a small one into a list; save a large one under ctx.folder."
    if isinstance(value, set | frozenset):
        return f"{do} sorted(...) of it, a list."
    if isinstance(value, complex):
        return f"{do} its .real and .imag as two fields."
    return f"{do} numbers, strings, or lists of them; save anything else under ctx.folder."


#: Results up to this size live in the ledger itself.
INLINE_BYTES = 4096


def store_value(folder: RunFolder, key: str, value: bytes) -> tuple[bytes | None, str | None]:
    """What goes into the ledger: the value, or None and the hash of the file that now holds it."""
    if len(value) <= INLINE_BYTES:
        return value, None
    path = folder.value(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, value)
    return None, hashlib.sha256(value).hexdigest()


def whole_value(folder: RunFolder, key: str, state: TaskState, value: bytes | None) -> bytes:
    """A task's encoded result, ``{}`` where it has none. ``value``: what the ledger holds of it."""
    if value is None and state is TaskState.DONE:
        return folder.value(key).read_bytes()
    return value or b"{}"


def publish(folder: RunFolder, key: str, token: int, *, may_go_on: bool = False) -> None:
    """Make the folder of an accepted attempt the task's artifact, and drop its checkpoint, unless
    the task was stopped and may go on.

    Does nothing for what is not there, so that doing it again is no harm.
    """
    # Mostly nothing is there, and every command is looked at: a Path costs more than the look.
    if not may_go_on and _is_there(f"{folder.checkpoints}/{key}"):
        source, target, saved = folder.attempt(key, token), folder.artifact(key), folder.saved(key)
        # Before the rename: after a crash between the two the attempt's folder is found again.
        into = target if target.exists() and not source.exists() else source
        into.mkdir(parents=True, exist_ok=True)
        os.replace(saved, into / _free_name({path.name for path in into.iterdir()}, "checkpoint"))
    if _is_there(f"{folder.attempts}/{key}.{token}"):
        source, target = folder.attempt(key, token), folder.artifact(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        os.replace(source, target)
    if not may_go_on:
        if _is_there(f"{folder.checkpoints}/{key}.ckpt"):
            folder.checkpoint(key).unlink()
        for number in range(1, token + 1):
            if _is_there(f"{folder.points}/{key}.{number}.jsonl"):
                points = folder.points_of(key, number)
                # The other one last: without it this one is not looked for.
                points.with_suffix(".cuts").unlink(missing_ok=True)
                points.unlink()


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


#: In front of a checkpoint: u32 length, and frames of what was logged and not known to be safe.
LOGGED = b"L"
_LENGTH = struct.Struct("<I")


def with_logged(frames: bytes, state: bytes) -> bytes:
    """The content of a checkpoint; `split_logged` takes it apart."""
    return LOGGED + _LENGTH.pack(len(frames)) + frames + state if frames else state


def split_logged(data: bytes) -> tuple[bytes, bytes]:
    """The frames in front of a checkpoint, and its state."""
    if data[:1] != LOGGED:
        return b"", data
    start = 1 + _LENGTH.size
    end = start + _LENGTH.unpack_from(data, 1)[0]
    return data[start:end], data[end:]


def hand_on(folder: RunFolder, key: str, heir: str) -> bool:
    """Give the task ``heir``, which has not begun, a copy of what the task ``key``, which rests,
    has saved; returns whether there was anything. What that one has logged stays its own.
    """
    found = False
    with suppress(FileNotFoundError):
        _copy_state(folder.checkpoint(key), folder.checkpoint(heir))
        found = True
    if folder.saved(key).is_dir():
        made, target = folder.saved(f".{heir}"), folder.saved(heir)
        for path in (made, target):  # of a coordinator that died here
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder.saved(key), made, symlinks=True)
        _turn_links(made, folder.saved(key).absolute(), target.absolute())
        sync_tree(made)
        os.replace(made, target)
        found = True
    return found


def _copy_state(source: Path, target: Path) -> None:
    """The state of a checkpoint of any size, in little memory. Checkpoints are replaced and never
    written to, so a second name of the file is a copy; where points stand in front of the state,
    and where a file system has no such names, it is written again.
    """
    with source.open("rb") as file:
        target.unlink(missing_ok=True)  # of a coordinator that died here
        head = file.read(1 + _LENGTH.size)
        start = 0
        if head[:1] == LOGGED:
            start = len(head) + _LENGTH.unpack_from(head, 1)[0]
        else:
            with suppress(OSError):
                os.link(source, target)
                sync_folder(target.parent)
                return
        file.seek(start)
        with replacing(target) as beside, beside.open("wb") as copy:
            shutil.copyfileobj(file, copy)


def _turn_links(folder: Path, source: Path, target: Path) -> None:
    """Have links in ``folder`` that lead into ``source`` lead to the same place in ``target``."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and (end := path.readlink()).is_relative_to(source):
                path.unlink()
                path.symlink_to(target / end.relative_to(source))


def _free_name(taken: Collection[str], name: str) -> str:
    """``name``, with a number behind it where it is taken."""
    free = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(each for each in free if each not in taken)


def publish_after_crash(
    folder: RunFolder, accepted_token: Callable[[str], tuple[str, int | None]]
) -> int:
    """Finish what a coordinator that died between commit and rename left; returns how many.

    ``accepted_token(key)`` answers with the task's state ("done", "stopped", "failed", "claimed",
    "open" or "unknown") and the token of its accepted result. Folders of attempts that were cut
    short are removed; those of failed tasks are kept for the user to look at, and those of claimed
    ones belong to workers that go on.
    """
    if not folder.attempts.exists():
        return 0
    published = 0
    for path in folder.attempts.iterdir():
        key, _, token = path.name.rpartition(".")
        state, accepted = accepted_token(key)
        if state in ("done", "stopped") and str(accepted) == token:
            publish(folder, key, int(token), may_go_on=state == "stopped")
            published += 1
        elif state in ("done", "stopped", "open"):
            shutil.rmtree(path, ignore_errors=True)
    return published
