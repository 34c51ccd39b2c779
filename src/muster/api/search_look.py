"""The space that a function's annotations describe, read in another process.

``python -m muster.api.search_look TARGET`` is that process: it imports the target and prints the
space as JSON, so that the coordinator stays free of what the target imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson

from muster.base.errors import TargetError
from muster.base.settings import child_environment
from muster.base.target import load, parse_target
from muster.search.space import Space

_MARK = b"\nmuster-space "


def annotated_space(target: str) -> Space | None:
    """None where no parameter is annotated with a range. Raises TargetError where the target cannot
    be imported."""
    argv = [sys.executable, "-m", "muster.api.search_look", target]
    done = subprocess.run(argv, capture_output=True, check=False, env=child_environment({}))
    _, mark, text = done.stdout.rpartition(_MARK)
    if done.returncode or not mark:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise TargetError(f"The space of {target} cannot be read: {said[-1]}")
    found = orjson.loads(text)
    return Space.from_json(found) if found else None


def main(target: str) -> int:
    space = Space.of_function(load(parse_target(target), Path.cwd()))
    sys.stdout.flush()
    found = {} if space is None else space.to_json()
    sys.stdout.buffer.write(_MARK + orjson.dumps(found))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
