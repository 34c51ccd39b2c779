"""Whether the code of a run is changed while the run is at work, by an editor or `git checkout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Literal

from muster.base.code import Code, project_folder
from muster.base.journal import read_journal
from muster.run.folder import RunFolder

_SHOWN = 3
#: What the journal calls it.
EVENT = "code"
#: When it is seen: while the run is at work, at an end that leaves something to do, or when all is
#: done; and what helps then against results of two codes.
When = Literal["now", "later", "done"]
ADVICE: Mapping[When, str] = {
    "now": "put it back, or begin anew with --restart",
    "later": "put it back before the run goes on, or begin anew with --restart",
    "done": "for results of one code alone, begin anew with --restart",
}


class CodeWatch:
    """``code``: what the run began with, whose files are looked for in the project of ``base``.

    A run goes on with changed code, because it may be a comment, and nobody may be there to ask.
    But whoever reads its table has to know.
    """

    def __init__(self, code: Code, base: Path) -> None:
        self._digests = dict(code)
        self._places = {name: path for name in code if (path := _place(name, base)) is not None}
        self._signs: dict[str, tuple[int, int, int]] = {}
        self._told: set[str] = set()

    def news(self) -> str:
        """A sentence about the files that have changed since the last call; "" where none has."""
        new = [name for name in self._changed() if name not in self._told]
        if not new:
            return ""
        self._told.update(new)
        more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
        return (
            f"{', '.join(new[:_SHOWN])}{more} changed while the run was at work. Every command and "
            "every worker that has started since then runs the new code, so the results may be of "
            "both"
        )

    def _changed(self) -> Iterator[str]:
        for name, path in self._places.items():
            try:
                about = path.stat()
                sign = (about.st_mtime_ns, about.st_size, about.st_ino)
                if self._signs.get(name) == sign:
                    continue
                digest = sha256(path.read_bytes()).hexdigest()
            except OSError:  # an editor may be about to put it back; without it, tasks fail
                continue
            self._signs[name] = sign
            if digest != self._digests[name]:
                yield name


def changes_of_code(folder: RunFolder) -> list[str]:
    """What a table does not say: that its results may be of more than one code."""
    lines = (line for line in read_journal(folder.events) if line.get("event") == EVENT)
    return list(dict.fromkeys(str(line["text"]) for line in lines if line.get("text")))


def _place(name: str, base: Path) -> Path | None:
    """Where the file is that a run's record calls so; None where it cannot be told."""
    places = (project_folder(base) / name, base / name)
    return next((path for path in places if path.is_file()), None)
