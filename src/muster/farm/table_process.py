"""``python -m muster.farm.table_process RUN`` refreshes the table of a run (`muster.farm.export`).
The coordinator runs it as a child, so that its own memory stays small.
"""

from __future__ import annotations

import gc
import os
import select
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from muster.base.errors import MusterError
from muster.base.reaper import die_with_parent
from muster.run.folder import RunFolder

#: The first version of pyarrow that can be imported where NumPy is not.
_WITHOUT_NUMPY = 18


#: The last argument of a process that is to import, and then to wait until it is told to write.
AHEAD = "ahead"
_PATIENCE_S = 10.0


class _Without:
    """Makes packages ones that are not there, in a process of its own. pyarrow imports pandas, to
    ask of every list whether it is a column of it, NumPy, for arrays that nobody here asks for,
    and cloudpickle, where pickle does: the first two take longer than a small table each.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self._packages:
            raise ModuleNotFoundError(f"{name} is not needed here", name=name)


def _needs_numpy() -> bool:
    """Whether this pyarrow may be one that is not imported without NumPy. Its version is read from
    the name of a folder: to ask for it takes a third of what NumPy does.
    """
    spec = PathFinder.find_spec("pyarrow")
    if spec is None or spec.origin is None:
        return True
    folders = Path(spec.origin).parent.parent.glob("pyarrow-*.dist-info")
    versions = [path.name.split("-")[1].partition(".")[0] for path in folders]
    return not versions or any(
        not version.isdigit() or int(version) < _WITHOUT_NUMPY for version in versions
    )


def _is_told() -> bool:
    """Whether somebody says that it is time, within some seconds."""
    return bool(select.select([0], [], [], _PATIENCE_S)[0] and os.read(0, 1))


def main(argv: list[str]) -> int:
    if len(argv) > 1:  # a child of this process: it goes when that is killed
        die_with_parent(int(argv[1]))
    is_ahead = AHEAD in argv[2:]
    gc.disable()  # rows hold no cycles, and what is imported stays
    sys.meta_path.insert(
        0, _Without("pandas", "cloudpickle", *([] if _needs_numpy() else ["numpy"]))
    )
    from muster.farm.export import refresh  # which imports pyarrow

    if is_ahead and not _is_told():
        return 1  # so that whoever has begun it knows that it has written nothing
    try:
        refresh(RunFolder(Path(argv[0])))
    except MusterError as problem:
        sys.exit(str(problem))
    gc.freeze()  # nor is it looked through at the end
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
