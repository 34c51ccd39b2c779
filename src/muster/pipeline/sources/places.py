"""Which places a folder or a pattern names, whether there is a file yet or not."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from muster.base.shown_text import count
from muster.run.folder import EXPERIMENT_FILE, RunFolder


class Places(NamedTuple):
    """``left_out``: what was passed by because runs have it, in words; empty for nothing."""

    files: list[Path]
    left_out: str


def inside(folder: Path, known: Collection[str] = ()) -> Places:
    """Files at any depth; hidden ones, those of other tools (``_SUCCESS``) and those of runs are
    not data. ``known``: places that an earlier start has read from, whatever they lie in.
    """
    files: list[Path] = []
    num_runs = 0
    for place, folders, names in os.walk(folder):
        here = Path(place)
        data = [name for name in folders if _is_data(name)]
        folders[:] = [name for name in data if not _is_run(here / name)]
        num_runs += len(data) - len(folders)
        files += [here / name for name in names if _is_data(name) and (here / name).is_file()]
    if known:
        whole, found = os.path.abspath(folder), set(map(os.path.abspath, files))
        more = (Path(name) for name in known if name not in found)
        files += [
            folder / file.relative_to(whole)
            for file in more
            if file.is_relative_to(whole) and file.is_file()
        ]
    return Places(files, f"{count(num_runs, 'folder')} of runs" if num_runs else "")


def matching(pattern: Path, known: Collection[str] = ()) -> Places:
    """The files that a pattern names, without those that lie in folders of runs which it happens to
    go through. One that says no more than where the runs are, as ``runs/*/results.csv``, means
    them. ``known``: as above.
    """
    parts = pattern.absolute().parts
    names = glob.glob(str(pattern), recursive=True)  # noqa: PTH207, absolute patterns too
    found = [path for path in map(Path, names) if not path.is_dir()]
    is_run = cache(_is_run)
    files = [
        path for path in found
        if os.path.abspath(path) in known or not _is_by_the_way(path.absolute(), parts, is_run)
    ]  # fmt: skip
    num_left = len(found) - len(files)
    return Places(files, f"{count(num_left, 'file')} in folders of runs" if num_left else "")


def _is_by_the_way(file: Path, pattern: Sequence[str], is_run: Callable[[Path], bool]) -> bool:
    """Whether it lies in a run that the pattern does not mean."""
    if "**" not in pattern and not glob.has_magic(pattern[-1]):
        return False
    num_fixed = len([*takewhile(lambda part: not glob.has_magic(part), pattern)])
    return any(is_run(folder) for folder in file.parents if len(folder.parts) > num_fixed)


def is_named(file: Path, text: str) -> bool:
    """Whether a file at that place would be read for an input that is named so."""
    place = Path(text).expanduser()
    real = Path(os.path.realpath(file.parent)) / file.name
    if place.is_dir():
        return _is_inside(real, Path(os.path.realpath(place)))
    pattern = _real_pattern(place)
    is_meant = not place.exists() and _fits(real.parts, pattern)
    return is_meant and not _is_by_the_way(real, pattern, _is_run)


def _is_inside(file: Path, folder: Path) -> bool:
    if not file.is_relative_to(folder) or file == folder:
        return False
    names = file.relative_to(folder).parts
    between = [folder.joinpath(*names[:depth]) for depth in range(1, len(names))]
    return all(map(_is_data, names)) and not any(map(_is_run, between))


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_"))


def _is_run(folder: Path) -> bool:
    """Whether it is the folder of a run or of an experiment. A file run.json alone may be data."""
    run = RunFolder(folder)
    if run.ledger.is_file() or (folder / EXPERIMENT_FILE).is_file():
        return True
    return run.run_json.is_file() and run.logs.is_dir()


def _real_pattern(pattern: Path) -> tuple[str, ...]:
    """Its parts, where no link is before the first sign of a pattern."""
    parts = pattern.absolute().parts
    head = list(takewhile(lambda part: not glob.has_magic(part), parts))
    return (*Path(os.path.realpath(Path(*head))).parts, *parts[len(head) :])


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """As `glob.glob` has it with ``recursive``."""
    if not parts or not pattern:
        return not parts and not pattern
    first, rest = pattern[0], pattern[1:]
    is_hidden = parts[0].startswith(".")
    if first == "**" and not rest:
        return not any(part.startswith(".") for part in parts)
    if first == "**":
        return _fits(parts, rest) or (not is_hidden and _fits(parts[1:], pattern))
    if is_hidden and not first.startswith("."):
        return False
    is_same = fnmatch(parts[0], first) if glob.has_magic(first) else parts[0] == first
    return is_same and _fits(parts[1:], rest)
