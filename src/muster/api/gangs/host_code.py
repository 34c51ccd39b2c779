"""The user's code, as it goes to the hosts of a gang over SSH."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from muster.base.errors import TargetError
from muster.base.modules import CLASS, is_installed
from muster.base.target import find_source, parse_target
from muster.gang.spec import Entry, Script
from muster.hosts.code import pack_code
from muster.hosts.connection import Connection

_MUSTER = Path(__file__).parents[3]


@dataclass(frozen=True)
class Code:
    """The folders with the user's code, the working folder first; none where nothing is his."""

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, program: Script | Entry) -> Code:
        home = Path.cwd()
        if isinstance(program, Script):
            source: Path | None = Path(os.path.abspath(program.path))
            if program.is_module or not source or not source.is_file() or is_installed(source):
                return cls((home,))
        else:
            source = _source_of(str(program.params.get("task", program.target)))
            if source is None:
                return cls(())
        return cls((home,) if source.is_relative_to(home) else (home, source.parent))

    @cached_property
    def packed(self) -> bytes:
        """A tar file of it. Raises SetupError where it is too large to be sent."""
        return pack_code(self.roots)

    @cached_property
    def digest(self) -> str:
        return sha256(self.packed).hexdigest()[:32]

    @cached_property
    def places(self) -> frozenset[str]:
        """The files that are in it: the number of the root, and the place below that."""
        with tarfile.open(fileobj=io.BytesIO(self.packed)) as tar:
            return frozenset(tar.getnames())

    def send(self, connection: Connection) -> None:
        """Lay it out on the host, where it is sent to unless an earlier start has."""
        if self.roots and not connection.ask("has_code", self.digest, limit_s=120.0):
            connection.ask(
                "take_code", self.digest, len(self.packed), after=self.packed, limit_s=600.0
            )
            connection.ask("has_code", self.digest, limit_s=120.0)


def _source_of(target: str) -> Path | None:
    """The file of the user's that a task is in; None where it is installed, Muster's, or sent with
    the run folder."""
    try:
        ref = parse_target(target, kind=CLASS)
        source = find_source(ref)
    except TargetError:
        return None
    if source is None:
        return None
    path = Path(os.path.abspath(source))
    is_ours = path.is_relative_to(_MUSTER) and ref.kind == "module"
    return None if is_ours or is_installed(path) else path
