"""With ``pytest -n``: the longest first, so that no core is left alone with a long file at the end.

A file is one unit, whose fixtures are made once; of the pages of docs, each is one. longest.txt
has the seconds of the units that take 15 or more, as `make test-all` has measured them; a unit
that is not in it comes after them, those with the most tests first. It is written anew by

    pytest … --durations=0 -vv | python tests/longest_first.py
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TABLE = Path(__file__).with_name("longest.txt")
#: Their tests share nothing that is made once for the file.
_APART = "tests/docs/test_commands.py"
_LEAST_S = 15
_DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown) +(tests/.+)")


def unit(test: str) -> str:
    """What is given to one process as a whole."""
    return test if test.startswith(_APART) else test.partition("::")[0]


class LongestFirst(LoadFileScheduling):
    """Of the units that wait, the one that takes longest is begun next."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        lines = TABLE.read_text().splitlines()
        self._seconds = {name: int(s) for s, name in (line.split(maxsplit=1) for line in lines)}

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=self._cost)
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _cost(self, name: str) -> tuple[int, int]:
        return self._seconds.get(name, 0), len(self.workqueue[name])


def table(log: Iterable[str]) -> str:
    """The lines of longest.txt from what pytest has printed with ``--durations=0 -vv``."""
    seconds: Counter[str] = Counter()
    for found in filter(None, map(_DURATION.match, log)):
        seconds[unit(found[2].strip())] += float(found[1])  # type: ignore[assignment]
    return "".join(f"{s:4.0f} {name}\n" for name, s in seconds.most_common() if s >= _LEAST_S)


if __name__ == "__main__":
    TABLE.write_text(table(sys.stdin))
