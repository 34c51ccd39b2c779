"""Muster in a Python that does not have it, which ``--python`` names.

A finder of modules brings it there, with what a worker needs, while everything else is that
Python's own. The children that multiprocessing spawns there need it as well: functions of a user's
file are modules below Muster's (`muster.base.target_files`), by which name pickle looks them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Makes Muster importable; ``ours`` are the folders that it and orjson are in. orjson may be
#: compiled for another Python; then theirs has to do.
FINDER = """
import sys
from importlib.machinery import PathFinder
class FindsMuster:
    @staticmethod
    def find_spec(name, path=None, target=None):
        known = ("muster", "muster_recipes", "orjson")
        return PathFinder.find_spec(name, ours) if name in known else None
sys.meta_path.insert(0, FindsMuster)
"""


class _RunsThere:
    """Nothing but what unpickling it does."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        return exec, (self._code, {})  # names of its own


def bring_to_children(ours: list[str]) -> None:
    """Have the children that this process spawns find Muster before they import anything.

    What multiprocessing tells a child first is pickled, and of that it ignores what it does not
    know. A folder at the end of the children's path would bring along all that lies in it.
    """
    import multiprocessing.spawn as spawn  # the coordinator reads this module for its FINDER

    tell = spawn.get_preparation_data
    finds = _RunsThere(f"ours = {ours!r}\n{FINDER}")

    def tell_more(name: str) -> dict[str, Any]:
        return {**tell(name), "muster": finds}

    spawn.get_preparation_data = tell_more
